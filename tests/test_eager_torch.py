"""torch without its compiler: training imports none, and a network that compiles finds the real one."""

import subprocess
import sys
from textwrap import dedent


def run_alone(code: str) -> None:
    subprocess.run([sys.executable, "-c", dedent(code)], check=True)


def test_a_training_step_of_two_workers_imports_no_compiler() -> None:
    run_alone("""
        import sys
        import tempfile
        import torch
        from torch import distributed, nn
        from raycl.distributed import ddp
        from raycl.models import vision
        from raycl.optim import build_optimizer
        from raycl.training.train_state import TrainState

        meeting = tempfile.NamedTemporaryFile()
        distributed.init_process_group("gloo", init_method=f"file://{meeting.name}", rank=0, world_size=1)
        ddp.num_workers = lambda: 2
        network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        parallel = ddp.average_gradients(network, torch.device("cpu"))
        for name in ("sgd", "adamw", "lars", "muon"):
            optimizer = build_optimizer(name, network)
            for _ in range(2):
                optimizer.zero_grad()
                parallel(torch.randn(8, 4)).square().mean().backward()
                TrainState(network, optimizer).update()
            optimizer.load_state_dict(optimizer.state_dict())
        assert "torch._dynamo" not in sys.modules

        compiled = torch.compile(network, backend="eager")
        assert type(compiled).__module__ == "torch._dynamo.eval_frame"
        compiled.eval()(torch.randn(8, 4))
        assert torch._dynamo.utils.counters["frames"]["ok"] >= 1
    """)


def test_an_imported_compiler_stays_and_an_error_removes_the_replacement() -> None:
    run_alone("""
        import sys
        from raycl.eager_torch import without_compiler
        try:
            with without_compiler():
                import torch
                assert torch._dynamo.disable(print) is print
                raise KeyError
        except KeyError:
            assert not {name for name in sys.modules if name.startswith("torch._dynamo")}
        import torch._dynamo
        from torch._dynamo import utils
        with without_compiler():
            assert sys.modules["torch._dynamo.utils"] is torch._dynamo.utils is utils
        assert sys.modules["torch._dynamo"] is torch._dynamo
    """)


def test_torchvision_keeps_a_function_that_asks_the_compiler() -> None:
    run_alone("""
        import sys
        from raycl.eager_torch import without_compiler
        with without_compiler():
            from torch._dynamo.utils import is_compile_supported
        assert "torch._dynamo" not in sys.modules
        supported = is_compile_supported("cpu")
        from torch._dynamo import utils
        assert supported == utils.is_compile_supported("cpu")
    """)
