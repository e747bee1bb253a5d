"""More than one process: statistics over all of them, and DDP. Two processes on gloo."""

import copy
import datetime as dt
import functools
import itertools
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import balnorm.functional as BF
from balnorm import BalNormConv2d, ChannelCentre, balance_report, convert, fold, update_stats
from balnorm._core import torch_private
from balnorm._core.backends import cpu
from cases import small_network

WORLD = 2
BACKENDS = ["native", "torch"]
TIMEOUT = dt.timedelta(minutes=10)  # a failure on one rank leaves the other waiting in a collective


def check_all(rank, folder):
    """Run every check below in this process of two; a failure goes to a file, for the test of that name to show."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    library = cpu._library
    for backend, (name, check) in itertools.product(BACKENDS, CHECKS.items()):
        cpu._library = library if backend == "native" else None
        torch.manual_seed(0)
        try:
            check(rank)
        except Exception:
            Path(folder, f"{backend}-{name}.failed{rank}").write_text(traceback.format_exc())
        Path(folder, f"{backend}-{name}.done{rank}").touch()
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One start of two processes for all checks: importing torch twice takes longer than all of them."""
    folder = tmp_path_factory.mktemp("distributed")
    mp.spawn(check_all, (folder,), nprocs=WORLD)
    return folder


def synchronised_is_one_process(rank, mass, shares, centred=False):
    """Gradients included, with shares of different size, and with an empty one, which still joins the collective."""
    model = small_network(mass=mass, centred=centred, sync_stats=True).double()
    single = small_network(mass=mass, centred=centred).double()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.bias.normal_()  # not 0: whether a ReLU lets a gradient through would be a matter of rounding
    single.load_state_dict(model.state_dict())
    for step in range(2):
        x = torch.randn(sum(shares), 3, 6, 6, generator=torch.Generator().manual_seed(step)).double()
        mine = x.split(list(shares))[rank].clone().requires_grad_()
        x.requires_grad_()
        model.zero_grad()
        single.zero_grad()
        y = model(mine)
        y.square().sum().backward()
        single(x).square().sum().backward()
        torch.testing.assert_close(mine.grad, x.grad.split(list(shares))[rank])
        for ours, whole in zip(model.parameters(), single.parameters(), strict=True):
            total = ours.grad.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, whole.grad)
        for (name, ours), whole in zip(model.named_buffers(), single.buffers(), strict=True):
            torch.testing.assert_close(ours, whole, msg=lambda m, name=name: f"{name}: {m}")


def centring_is_that_of_one_process(rank):
    for shares in ((5, 3), (6, 0)):
        layer, single = ChannelCentre(3, sync_stats=True).double(), ChannelCentre(3).double()
        x = torch.randn(sum(shares), 3, 6, 6, generator=torch.Generator().manual_seed(0)).double()
        mine = x.split(list(shares))[rank].clone().requires_grad_()
        x.requires_grad_()
        layer(mine).pow(3).sum().backward()
        single(x).pow(3).sum().backward()
        torch.testing.assert_close(mine.grad, x.grad.split(list(shares))[rank])
        for ours, whole in zip(layer.buffers(), single.buffers(), strict=True):
            torch.testing.assert_close(ours, whole)


def sums_in_older_torch_have_gradients(rank):
    """In the place of torch's own collectives, whose gradients are wrong there."""
    have, torch_private.COLLECTIVES_HAVE_GRADIENTS = torch_private.COLLECTIVES_HAVE_GRADIENTS, False
    try:
        for centred in (False, True):
            synchronised_is_one_process(rank, "position", (5, 3), centred)
        second_derivatives_are_synchronised(rank)
    finally:
        torch_private.COLLECTIVES_HAVE_GRADIENTS = have


def second_derivatives_are_synchronised(rank):
    for centred in (False, True):
        layer = BalNormConv2d(3, 4, 3, centred=centred, sync_stats=True).double()
        single = copy.deepcopy(layer)
        single.sync_stats = False
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).double()
        mine = x.split(2)[rank].clone().requires_grad_()
        (g,) = torch.autograd.grad(layer(mine).square().sum(), mine, create_graph=True)
        (ours,) = torch.autograd.grad(g.square().sum(), mine)
        x.requires_grad_()
        (g,) = torch.autograd.grad(single(x).square().sum(), x, create_graph=True)
        (whole,) = torch.autograd.grad(g.square().sum(), x)
        torch.testing.assert_close(ours, whole.split(2)[rank])


def a_process_group_limits_the_synchronisation(rank):
    groups = [dist.new_group([r]) for r in range(WORLD)]
    layer = BalNormConv2d(3, 4, 3, sync_stats=True, process_group=groups[rank])
    alone = BalNormConv2d(3, 4, 3)
    x = torch.rand(2, 3, 5, 5) * (rank + 1)
    layer(x)
    alone(x)
    torch.testing.assert_close(layer.running_mean, alone.running_mean)
    torch.testing.assert_close(layer.running_mass, alone.running_mass)


def two_forwards_before_one_backward_under_ddp(rank):
    """DDP broadcasts the buffers before each forward: in-place changes raised in backward elsewhere."""
    model = DistributedDataParallel(small_network().double())
    x = torch.rand(2, 3, 6, 6).double() * (rank + 1)
    loss = model(x).square().sum() + model(2 * x).square().sum()
    loss.backward()
    for parameter in model.parameters():
        total = parameter.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / WORLD, parameter.grad)


def statistics_are_per_process_by_default(rank):
    model = DistributedDataParallel(small_network().double(), broadcast_buffers=False)
    x = torch.rand(2, 3, 6, 6).double() * (rank + 1)
    model(x).sum().backward()
    expected = (x.sum((0, 2, 3)) / (2 * 9 * 4)).view(1, 3, 1, 1)
    torch.testing.assert_close(model.module[0].running_mean, expected)
    torch.testing.assert_close(model.module[0].running_mass, expected)


def synchronised_statistics_compile(rank):
    torch._dynamo.reset()
    eager = BalNormConv2d(3, 4, 3, sync_stats=True).double()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=torch_private.COLLECTIVES_HAVE_GRADIENTS)
    x = torch.rand(2, 3, 6, 6).double() * (rank + 1)
    for m in (compiled, eager):
        m(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def one_process_evaluates_alone(rank):
    """Statistics are synchronised in training only; a rank that evaluates by itself would wait for ever."""
    layer = BalNormConv2d(3, 4, 3, sync_stats=True, track_running_stats=False).eval()
    if rank == 0:
        layer(torch.rand(2, 3, 5, 5))
        balance_report(layer, torch.rand(2, 3, 5, 5))


def updated_statistics_are_those_of_all_batches(rank):
    """With shares of different sizes, and with none for one rank, which has no batch to synchronise."""
    batches = [torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(n)) for n in (1, 4, 2)]
    for shares in ([batches[:1], batches[1:]], [batches, []]):
        options = {"sync_stats": True, "process_group": dist.group.WORLD}
        layer = BalNormConv2d(3, 4, 3, padding=1, mass="position", **options)
        update_stats(shares[rank], layer)
        assert {name: getattr(layer, name) for name in options} == options
        mean, mass = BF.statistics(torch.cat(batches), 3, padding=1, mass="position")
        torch.testing.assert_close(layer.running_mean, mean)
        torch.testing.assert_close(layer.running_mass, mass)
        assert layer.num_batches_tracked == 3


def conversion_refuses_ddp(rank):
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)))
    with pytest.raises(ValueError, match="the model is wrapped in DistributedDataParallel"):
        convert(model)


def sharded_models_train_on_after_they_were_looked_at(rank):
    """FSDP2 believed its parameters gathered when they had been put back, and the next step failed."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # an older torch
        return
    whole, model = small_network(), small_network()
    model.load_state_dict(whole.state_dict())
    x = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for other in (whole, model):
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for look in (lambda m: update_stats([x], m), lambda m: balance_report(m, x)):
            look(other)
            optimizer.zero_grad()
            other(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model(x), whole(x), atol=1e-4, rtol=1e-3)
    for refused in (model[0].effective_weight, lambda: fold(model)):
        with pytest.raises(RuntimeError, match=r"sharded: gather them first, with unshard\(\)"):
            refused()


CHECKS = {
    f"synchronised_is_one_process-{mass}-{shares[0]}-{shares[1]}": functools.partial(
        synchronised_is_one_process, mass=mass, shares=shares
    )
    for mass in BF.MASSES
    for shares in ((4, 4), (5, 3), (6, 0))
}
CHECKS |= {
    f"centred_is_one_process-{mass}-{shares[0]}-{shares[1]}": functools.partial(
        synchronised_is_one_process, mass=mass, shares=shares, centred=True
    )
    for mass in BF.MASSES
    for shares in ((5, 3), (6, 0))
}
CHECKS |= {
    check.__name__: check
    for check in (
        second_derivatives_are_synchronised,
        centring_is_that_of_one_process,
        sums_in_older_torch_have_gradients,
        a_process_group_limits_the_synchronisation,
        two_forwards_before_one_backward_under_ddp,
        statistics_are_per_process_by_default,
        synchronised_statistics_compile,
        one_process_evaluates_alone,
        updated_statistics_are_those_of_all_batches,
        conversion_refuses_ddp,
        sharded_models_train_on_after_they_were_looked_at,
    )
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(folder, name, backend):
    for rank in range(WORLD):
        assert (folder / f"{backend}-{name}.done{rank}").exists()
        failure = folder / f"{backend}-{name}.failed{rank}"
        assert not failure.exists(), failure.read_text()


def test_sync_stats_without_a_process_group_is_one_process():
    layer = BalNormConv2d(3, 4, 3, sync_stats=True)
    x = torch.rand(2, 3, 5, 5)
    layer(x)
    expected = x.sum((0, 2, 3)).view(1, 3, 1, 1) / (2 * 9)
    torch.testing.assert_close(layer.running_mean, expected)
    torch.testing.assert_close(layer.running_mass, expected)
