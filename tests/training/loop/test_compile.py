"""``training.compile``: the same training, by generated code."""

import shutil

import pytest
import torch
from training_runs import recipe, train, vectors, weights

from nearfar.training.trainer import open_model

needs_a_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")),
    reason="torch.compile needs a C++ compiler on a CPU, and there is none on the PATH",
)


@needs_a_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_network_learns_the_same(tmp_path, monkeypatch):
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "compile_threads", 1)  # no pool of processes for two small graphs
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # compiled here and now
    file, compiled = vectors(tmp_path), {"training__compile": True}
    for name, settings in (("plain", {}), ("compiled", compiled)):
        torch.compiler.reset()
        train(recipe(file, training__iterations=4, **settings), tmp_path / name)
    assert list((tmp_path / "cache").rglob("*.cpp")), "nothing was compiled"
    plain, found = weights(tmp_path / "plain"), weights(tmp_path / "compiled")
    assert plain.keys() == found.keys()  # a checkpoint does not show it, and opens anywhere
    for name, tensor in plain.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    assert open_model(tmp_path / "compiled")(torch.zeros(2, 6)).shape == (2, 4)
