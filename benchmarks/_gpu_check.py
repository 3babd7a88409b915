"""One-off: tests/python/test_optim_offload.py's first tests on the GPU, without pytest."""
import sys, types, time, traceback
fake = types.ModuleType("pytest")
class Mark:
    def __getattr__(self, name):
        if name == "parametrize":
            def decorate(names, values, ids=None):
                def wrap(f):
                    f.__dict__.setdefault("params", []).insert(0, (names, values)); return f
                return wrap
            return decorate
        return lambda f: f
fake.mark = Mark()
class Skip(Exception): pass
def skip(text): raise Skip(text)
fake.skip = skip
fake.param = lambda v, marks=None: v
fake.fixture = lambda *a, **k: (lambda f: f)
fake.FixtureRequest = fake.MonkeyPatch = object
class Raises:
    def __init__(self, kind, match=None): self.kind = kind
    def __enter__(self): return self
    def __exit__(self, kind, value, tb):
        assert kind is not None; return issubclass(kind, self.kind)
fake.raises = Raises
sys.modules["pytest"] = fake
sys.path.insert(0, "tests/python")
import test_optim_offload as t
import torch
DEV = "cuda" if torch.cuda.is_available() else "cpu"
def cases(f):
    sets = [{}]
    for names, values in getattr(f, "params", []):
        names = names if isinstance(names, tuple) else (names,)
        sets = [{**s, **dict(zip(names, v if len(names) > 1 else (v,)))} for s in sets for v in values]
    return sets
done = failed = 0
begin = time.time()
for name, f in vars(t).items():
    if not name.startswith("test_"): continue
    for case in cases(f):
        if "device" in f.__code__.co_varnames[:f.__code__.co_argcount]: case["device"] = DEV
        try:
            f(**case); done += 1
        except Skip: pass
        except Exception:
            failed += 1; print("FAILED", name, case); traceback.print_exc(limit=-3)
            if failed > 4: sys.exit(1)
torch.cuda.synchronize()
print(f"offload on the GPU: {done} passed, {failed} failed, {time.time() - begin:.1f} s")
