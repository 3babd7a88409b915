"""Words in, exit codes and one line out: help, misspellings, colour, completion."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
from running import Kpt

COMMANDS = (
    "doctor",
    "devices",
    "kernels",
    "explain",
    "tune",
    "bench",
    "verify",
    "cache",
    "compile",
    "learn",
    "version",
    "completion",
)


def run_on_terminal(program: str, arguments: list[str], environment: dict[str, str]) -> str:
    """What the program writes when standard output is a terminal."""
    main, side = pty.openpty()
    process = subprocess.Popen(
        [program, *arguments], stdout=side, stderr=side, stdin=subprocess.DEVNULL, env=environment
    )
    os.close(side)
    written = b""
    while True:
        try:
            block = os.read(main, 65536)
        except OSError:  # Linux's way of saying that the other side is closed
            break
        if not block:
            break
        written += block
    os.close(main)
    assert process.wait(timeout=60) == 0
    return written.decode()


def one_line_of(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("kpt: ")
    return lines[0]


def test_help_lists_every_command(kpt: Kpt) -> None:
    result = kpt("--help")
    assert result.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout.replace("bench, benchmark", "bench")
        inner = kpt(command, "--help")
        assert inner.returncode == 0, inner.stderr
        assert inner.stderr == ""


def test_version_is_the_same_everywhere(kpt: Kpt) -> None:
    words = kpt("version").stdout.split()
    assert words[0] == "kpt"
    assert kpt("--version").stdout.split() == words
    assert json.loads(kpt("version", "--json").stdout) == {"version": words[1]}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), "subcommand"),
        (("doctr",), "did you mean doctor?"),
        (("frobnicate",), "unknown command"),
        (("kernels", "rms_nrom"), "did you mean rms_norm?"),
        (("kernels", "rms_nrom_forward"), "did you mean rms_norm_forward?"),
        (("kernels", "rms_nor"), "did you mean rms_norm?"),
        (("explain", "rms_norm"), "--shape"),
        (("explain", "rms_norm", "--shape", "12y4"), "1024x4096"),
        (("explain", "rms_norm", "--shape", "-4x4"), "-4"),
        (("explain", "rms_norm", "--shape", "9223372036854775807x9223372036854775807"), "63 bits"),
        (("explain", "rms_norm", "--shape", "8x8", "--dtype", "fp12"), "bf16"),
        (("explain", "rms_norm", "--shape", "8x8", "--device", "tpu"), "cuda"),
        (("explain", "rms_norm", "--shape", "8x8", "--option", "residual"), "NAME=VALUE"),
        (("explain", "rms_norm", "--shape", "8x8", "--option", "frobs=1"), "frobs"),
        *(
            (
                ("explain", "embedding_forward", "--shape", "8x8", "--option", f"rows={value}"),
                "a whole number is needed",
            )
            for value in ("1.5", "1e30", "nan", "")
        ),
        (("explain", "softmax_forward", "--shape", "8x8", "--option", "scale=nan"), "a number is needed"),
        (("explain", "rms_norm", "--shape", "8x8", "--frob"), "--frob"),
        (("tune", "rms_norm", "--shape", "8x8", "--budget", "-1"), "budget"),
        *(
            ((*command, value), f"{value} is not a number from")
            for command in (
                ("tune", "rms_norm", "--shape", "8x8", "--budget"),
                ("bench", "rms_norm", "--seconds"),
                ("bench", "--threshold"),
                ("bench", "--significance"),
                ("optimize", "--budget"),
            )
            for value in ("nan", "inf", "-inf", "-1", "1e999", "3s", "")
        ),
        (("compile", "--arch", "sm_90a", "--output", "x"), "--all"),
        (("compile", "--source", "x.cu", "--arch", "sm_90a", "--output", "x"), "--entry"),
        (("compile", "rms_norm", "--source", "x.cu", "--entry", "f", "--arch", "sm_90a", "--output", "x"), "not two"),
        (("compile", "--all", "--arch", "sm_90a", "--output", "x", "--record"), "--known"),
        (("compile", "--all", "--arch", "sm_90a", "--output", "x", "--known", "k", "--again", "16/16"), "from 0"),
        (("cache",), "subcommand"),
        (("cache", "clear", "--store", "--cubins"), "not both"),
        (("verify", "--dtype", "bf16"), "--shape"),
        (("completion", "tcsh"), "tcsh"),
    ],
)
def test_words_that_cannot_be_followed_are_a_usage_error(kpt: Kpt, arguments: tuple[str, ...], wanted: str) -> None:
    result = kpt(*arguments)
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert wanted in one_line_of(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ((), "kpt"),
        (("explain",), "kpt explain"),
        (("explain", "rms_norm"), "kpt explain"),
        (("bench", "rms_norm", "--shape", "8x8", "--frob"), "kpt bench"),
        (("cache",), "kpt cache"),
        (("cache", "clear", "--frob"), "kpt cache clear"),
        (("--frob",), "kpt"),
    ],
)
def test_the_hint_names_the_command_whose_help_shows_how(kpt: Kpt, arguments: tuple[str, ...], command: str) -> None:
    line = one_line_of(kpt(*arguments).stderr)
    assert line.endswith(f"({command} --help shows how)")
    assert kpt(*command.split()[1:], "--help").returncode == 0


def test_a_device_that_is_not_there_is_a_failure_with_its_reason(kpt: Kpt) -> None:
    result = kpt("explain", "rms_norm", "--shape", "8x8", "--device", "cuda:9", KERNEL_PYTORCH_DISABLE_CUDA="1")
    assert result.returncode == 1
    assert "KERNEL_PYTORCH_DISABLE_CUDA" in one_line_of(result.stderr)


def test_output_that_cannot_be_written_is_a_failure(program: str, environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [program, "kernels"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert result.returncode == 1
    assert "cannot be written" in one_line_of(result.stderr)


@pytest.mark.parametrize(("changes", "wanted"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_only_on_a_terminal_that_wants_it(
    program: str, environment: dict[str, str], kpt: Kpt, changes: dict[str, str], wanted: bool
) -> None:
    arguments = ["explain", "rms_norm_forward", "--shape", "8x64"]
    assert ("\033[" in run_on_terminal(program, arguments, {**environment, **changes})) == wanted
    assert "\033[" not in kpt(*arguments, **changes).stdout


def complete_in_bash(script: str, words: list[str]) -> set[str]:
    typed = " ".join(f"'{word}'" for word in words)
    program = f"{script}\nCOMP_WORDS=({typed})\nCOMP_CWORD={len(words) - 1}\n_kpt\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_bash_completion_completes(kpt: Kpt) -> None:
    script = kpt("completion", "bash").stdout
    assert set(COMMANDS) <= complete_in_bash(script, ["kpt", ""])
    assert complete_in_bash(script, ["kpt", "dev"]) == {"devices"}
    assert {"rms_norm_forward", "rms_norm_backward"} <= complete_in_bash(script, ["kpt", "explain", "rms"])
    assert complete_in_bash(script, ["kpt", "explain", "rms_norm", "--sh"]) == {"--shape"}
    assert {"fp32", "bf16"} <= complete_in_bash(script, ["kpt", "explain", "rms_norm", "--dtype", ""])
    assert {"list", "export", "import", "verify", "clear"} <= complete_in_bash(script, ["kpt", "cache", ""])
    assert complete_in_bash(script, ["kpt", "cache", "clear", "--cu"]) == {"--cubins"}
    assert complete_in_bash(script, ["kpt", "completion", ""]) >= {"bash", "zsh", "fish"}


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_other_shells_accept_their_scripts(kpt: Kpt, tmp_path: Path, shell: str, check: str) -> None:
    script = kpt("completion", shell).stdout
    for command in COMMANDS:
        assert command in script
    assert "rms_norm_forward" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its syntax was not checked")
    (tmp_path / "script").write_text(script)
    subprocess.run([shell, check, str(tmp_path / "script")], check=True)
