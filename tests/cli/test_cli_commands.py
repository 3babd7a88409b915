"""What the commands do: explanations, measurements that stay, caches, the doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import Kpt


def json_of(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_devices(kpt: Kpt) -> None:
    listed = json_of(kpt("devices", "--json"))
    cpu = listed["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["name"]
    assert cpu["cpu"]["cores"] >= 1
    assert bool(listed["cuda_absence"]) == (len(listed["devices"]) == 1)
    text = kpt("devices").stdout
    assert cpu["name"] in text
    assert cpu["cpu"]["isa"] in text


def test_devices_without_cuda_say_why(kpt: Kpt) -> None:
    listed = json_of(kpt("devices", "--json", KERNEL_PYTORCH_DISABLE_CUDA="1"))
    assert [device["device"] for device in listed["devices"]] == ["cpu"]
    assert "KERNEL_PYTORCH_DISABLE_CUDA" in listed["cuda_absence"]


def test_kernels_end_with_the_reference(kpt: Kpt) -> None:
    every = json_of(kpt("kernels", "--json"))["operations"]
    assert {"rms_norm_forward", "rms_norm_backward", "layer_norm_forward"} <= {each["op"] for each in every}
    for operation in every:
        assert operation["kernels"][-1] == "reference"
    family = json_of(kpt("kernels", "rms_norm", "--json"))["operations"]
    assert [each["op"] for each in family] == ["rms_norm_forward", "rms_norm_backward"]
    assert "layer_norm" not in kpt("kernels", "rms_norm").stdout


def test_explain_gives_every_kernel_a_verdict(kpt: Kpt) -> None:
    arguments = ("explain", "rms_norm", "--shape", "64x1000", "--dtype", "bf16")
    explanations = json_of(kpt(*arguments, "--json"))["explanations"]
    assert [each["op"] for each in explanations] == ["rms_norm_forward", "rms_norm_backward"]
    for explanation in explanations:
        assert explanation["tier"] == "heuristic"
        supported = [each["kernel"] for each in explanation["candidates"] if each["supported"]]
        assert explanation["kernel"] == supported[0]
        for candidate in explanation["candidates"]:
            assert candidate["supported"] or candidate["reason"]
    text = kpt(*arguments).stdout
    assert "by tier heuristic" in text
    for candidate in explanations[0]["candidates"]:
        assert candidate["kernel"] in text
        assert candidate["reason"] in text


def test_explain_follows_an_override(kpt: Kpt) -> None:
    result = kpt("explain", "rms_norm_forward", "--shape", "8x64", "--kernel", "reference", "--json")
    explanation = json_of(result)["explanations"][0]
    assert (explanation["kernel"], explanation["tier"]) == ("reference", "override")


def test_a_tuned_choice_stays(kpt: Kpt) -> None:
    problem = ("rms_norm_forward", "--shape", "256x1024", "--dtype", "bf16")
    report = json_of(kpt("tune", *problem, "--json"))["reports"][0]
    best = report["rows"][0]
    assert report["complete"]
    assert best["failure"] == ""
    assert best["median_us"] > 0
    assert best["median_us"] == min(row["median_us"] for row in report["rows"])
    explanation = json_of(kpt("explain", *problem, "--json"))["explanations"][0]
    assert (explanation["kernel"], explanation["config"]) == (best["kernel"], best["config"])
    assert explanation["tier"] == "persistent"
    assert explanation["measured_us"] == pytest.approx(best["median_us"])
    kept = json_of(kpt("cache", "list", "--json"))
    assert kept["store"]["state"] == "ready"
    assert [row["key"] for row in kept["measurements"]] == [report["key"]]
    assert "the winner is remembered" in kpt("tune", *problem, "--budget", "1").stdout


def test_nothing_is_said_to_be_remembered_where_it_is_not(kpt: Kpt, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    result = kpt("tune", "rms_norm_forward", "--shape", "16x128", "--budget", "1")
    assert result.returncode == 0
    assert "the winner is remembered" not in result.stdout
    assert "the winner is forgotten when this process ends" in result.stdout
    assert "memory only" in result.stdout
    assert result.stderr.count(f"chmod go-w {cache}") == 1
    assert list(cache.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_another_user_is_not_used_even_by_root(kpt: Kpt, tmp_path: Path) -> None:
    problem = ("rms_norm_forward", "--shape", "16x128")
    assert kpt("tune", *problem, "--budget", "1").returncode == 0
    assert json_of(kpt("explain", *problem, "--json"))["explanations"][0]["tier"] == "persistent"
    for foreign in (tmp_path / "cache" / "tuning.db", tmp_path / "cache"):
        os.chown(foreign, 1234, 1234)
        result = kpt("explain", *problem, "--json")
        assert json_of(result)["explanations"][0]["tier"] == "heuristic"
        assert result.stderr.count(f"{foreign} belongs to user 1234") == 1
        os.chown(foreign, 0, 0)


def test_interrupted_tuning_keeps_what_was_measured(program: str, environment: dict[str, str], kpt: Kpt) -> None:
    shapes = [argument for columns in range(64, 640) for argument in ("--shape", f"64x{columns}")]
    process = subprocess.Popen(
        [program, "tune", "rms_norm_forward", *shapes],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "remembered" in line:
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=60)
    written = "".join(lines) + rest
    assert process.returncode == 130, errors
    reports = written.count("the winner is remembered")
    assert 1 <= reports < len(shapes) // 2
    assert "store: " in rest
    # Problems of one bucket share a row, so there are at most as many rows as reports.
    assert 1 <= len(json_of(kpt("cache", "list", "--json"))["measurements"]) <= reports


def test_export_clear_import(kpt: Kpt, tmp_path: Path) -> None:
    assert kpt("tune", "rms_norm", "--shape", "32x256", "--budget", "1").returncode == 0
    exported = tmp_path / "measured.json"
    assert kpt("cache", "export", str(exported)).returncode == 0
    assert json.loads(kpt("cache", "export").stdout) == json.loads(exported.read_text())
    before = json_of(kpt("cache", "list", "--json"))["measurements"]
    assert {row["key"]["op"] for row in before} == {"rms_norm_forward", "rms_norm_backward"}
    assert "1 measurements" in kpt("cache", "clear", "rms_norm_forward").stdout
    assert "1 measurements" in kpt("cache", "clear").stdout
    assert json_of(kpt("cache", "list", "--json"))["measurements"] == []
    assert "2 measurements imported" in kpt("cache", "import", str(exported)).stdout
    assert json_of(kpt("cache", "list", "--json"))["measurements"] == before
    assert "sound" in kpt("cache", "verify").stdout
    assert json_of(kpt("cache", "verify", "--json")) == {"store": [], "cubins": []}


@pytest.mark.parametrize("content", [b"", b"not JSON", b"[1, 2]", b'{"format": 99}', b"\x00\xff" * 100, b"[" * 100_000])
def test_a_hostile_import_is_refused_whole(kpt: Kpt, tmp_path: Path, content: bytes) -> None:
    hostile = tmp_path / "hostile.json"
    hostile.write_bytes(content)
    result = kpt("cache", "import", str(hostile))
    assert result.returncode == 1
    assert result.stderr.startswith("kpt: ")
    assert len(result.stderr.splitlines()) == 1
    assert json_of(kpt("cache", "list", "--json"))["measurements"] == []


def test_an_import_that_is_too_large_or_missing_is_refused(kpt: Kpt, tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(100 << 20)
    assert "64 MiB" in kpt("cache", "import", str(huge)).stderr
    missing = kpt("cache", "import", str(tmp_path / "missing.json"))
    assert missing.returncode == 1
    assert "No such file" in missing.stderr


def test_the_cache_folder_can_be_named(kpt: Kpt, tmp_path: Path) -> None:
    other = tmp_path / "other"
    listed = json_of(kpt("--cache-dir", str(other), "cache", "list", "--json"))
    assert listed["store"]["path"].startswith(str(other))


def test_bench_measures_against_a_copy(kpt: Kpt) -> None:
    arguments = ("bench", "rms_norm_forward", "--shape", "64x1024", "--seconds", "0.02")
    chosen = json_of(kpt(*arguments, "--json"))["benchmarks"][0]
    assert chosen["copy_us"] > 0
    assert chosen["cost"]["bytes"] >= 2 * 64 * 1024 * 4
    assert len(chosen["rows"]) == 1
    row = chosen["rows"][0]
    assert row["gigabytes_per_second"] == pytest.approx(chosen["cost"]["bytes"] / row["median_us"] * 1e-3, rel=1e-3)
    every = json_of(kpt(*arguments, "--all", "--json"))["benchmarks"][0]
    assert "reference" in {each["kernel"] for each in every["rows"]}
    assert "OF A COPY" in kpt(*arguments).stdout


def test_bench_has_a_longer_name(kpt: Kpt) -> None:
    result = kpt("benchmark", "rms_norm_forward", "--shape", "5x64", "--seconds", "0.01")
    assert result.returncode == 0 and "OF A COPY" in result.stdout


def test_compile_takes_a_source_of_ones_own(kpt: Kpt, tmp_path: Path) -> None:
    source, cubin = tmp_path / "mine.cu", tmp_path / "mine.cubin"
    source.write_text(
        '#include "kernel_pytorch/cuda/tile/reduce.cuh"\n'
        'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n'
    )
    words = ("compile", "--source", str(source), "--arch", "sm_90a", "--output", str(cubin))
    result = kpt(*words, "--entry", "twice", "--strict")
    assert result.returncode == 0, result.stderr
    assert cubin.read_bytes()[:4] == b"\x7fELF" and "function twice" in result.stdout
    wrong = kpt(*words, "--entry", "thrice")
    assert wrong.returncode == 1 and "thrice" in wrong.stderr


def test_verify_counts_what_it_checked(kpt: Kpt) -> None:
    result = kpt("verify", "layer_norm", "--shape", "33x777", "--dtype", "bf16", "--option", "residual=1")
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1] == "2 passed, 0 failed"
    report = json_of(kpt("verify", "rms_norm", "--shape", "5x64", "--shape", "0x64", "--json"))
    assert (report["passed"], report["failed"]) == (4, 0)
    assert all(problem["kernels"] >= 2 for problem in report["problems"])


def test_compile_leaves_out_known_kernels(kpt: Kpt, tmp_path: Path) -> None:
    words = ("compile", "softmax_backward", "--arch", "sm_80", "--output", str(tmp_path / "bundle"), "--json")
    kernels = json_of(kpt(*words, "--sample"))["kernels"]
    version = json_of(kpt("doctor", "--json"))["nvrtc"]["version"]
    keys = sorted(path.stem for path in (tmp_path / "bundle").glob("*.cubin"))
    assert len(keys) == len(kernels) > 0
    known = tmp_path / "known.txt"
    first_line = f"kernels that NVRTC {version} compiles without spills and warnings"

    def compiled(line: str, *more: str) -> int:
        known.write_text("\n".join([line, *keys, ""]))
        return len(json_of(kpt(*words, "--sample", "--known", str(known), *more))["kernels"])

    assert compiled(first_line) == 0
    assert compiled("kernels that NVRTC 1.0 compiles without spills and warnings") == len(keys)
    assert sum(compiled(first_line, "--again", f"{part}/2") for part in range(2)) == len(keys)


def test_compile_refuses_an_unknown_architecture(kpt: Kpt, tmp_path: Path) -> None:
    result = kpt("compile", "rms_norm_forward", "--arch", "sm_nonsense", "--output", str(tmp_path / "bundle"))
    assert result.returncode == 1
    assert result.stderr.startswith("kpt: ")


def test_compile_says_why_no_kernel_fits(kpt: Kpt, tmp_path: Path) -> None:
    result = kpt("compile", "rms_norm", "--arch", "sm_1", "--output", str(tmp_path / "bundle"))
    assert result.returncode == 1
    assert "kernels runs on sm_1; the least that they need is sm_80" in result.stderr
    assert not (tmp_path / "bundle").exists()


def test_python_runs_the_same_program(environment: dict[str, str], kpt: Kpt) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kernel_pytorch", "version"], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == kpt("version").stdout
    failed = subprocess.run(
        [sys.executable, "-m", "kernel_pytorch", "doctr"], env=environment, capture_output=True, check=False
    )
    assert failed.returncode == 2


def test_bench_keeps_samples_and_compares_them(kpt: Kpt, tmp_path: Path) -> None:
    file, other = str(tmp_path / "samples.json"), tmp_path / "other.json"
    arguments = ("bench", "rms_norm_forward", "--shape", "64x1024", "--seconds", "0.02", "--save", file)
    for _ in range(2):
        assert kpt(*arguments).returncode == 0
    stored = json.loads(Path(file).read_text())
    assert [len(run["series"]) for run in stored["runs"]] == [1, 1]
    series = stored["runs"][0]["series"][0]
    assert series["name"] == "rms_norm_forward 64x1024 fp32"
    assert len(series["samples_us"]) == len(series["control_us"]) >= 3
    same = kpt("bench", "--compare", file, file)
    assert same.returncode == 0, same.stderr
    assert "no clear change" in same.stdout and "0 slower, 0 faster by more than 5 %, 1 compared" in same.stdout

    for run in stored["runs"]:
        series = run["series"][0]
        series["samples_us"] = [2 * value for value in series["samples_us"]]
    other.write_text(json.dumps(stored))
    slower = kpt("bench", "--compare", file, str(other), "--json")
    assert slower.returncode == 1
    assert [(row["change"], round(row["ratio"], 2)) for row in json.loads(slower.stdout)["rows"]] == [("slower", 2.0)]
    assert kpt("bench", "--compare", str(other), file).returncode == 0  # faster is no failure
    assert kpt("bench", "--compare", file, str(other), "--threshold", "150").returncode == 0


def test_bench_refuses_files_that_are_none_of_its_own(kpt: Kpt, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    saved = kpt("bench", "rms_norm_forward", "--shape", "8x8", "--save", str(wrong))
    assert saved.returncode == 1 and "no file of timings" in saved.stderr
    assert wrong.read_text() == "{}"
    for files in ((str(wrong), str(wrong)), (str(tmp_path / "absent"), str(wrong))):
        assert kpt("bench", "--compare", *files).returncode == 1
    assert kpt("bench", "--compare", str(wrong)).returncode == 2
    assert kpt("bench", "rms_norm", "--compare", str(wrong), str(wrong)).returncode == 2
