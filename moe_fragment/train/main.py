"""What the deepspeed launcher starts on every rank; `recipes/pretrain.py` is a door to it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings

from moe_fragment.fabric import FleetError
from moe_fragment.schema import ConfigError
from moe_fragment.train.peers import PeerWatch
from moe_fragment.train.recipe import Recipe
from moe_fragment.train.world import World, WorldError, find_world, release_shared_buffers

_DYING_S = 1.0
"""How long a rank may take to be gone after its connections are."""


def arguments() -> argparse.ArgumentParser:
    """The command line of a rank."""
    parser = argparse.ArgumentParser(
        prog="pretrain.py",
        description="Train a mixture-of-experts model across clusters. Started by the deepspeed launcher: without "
        "--cluster one launcher runs the whole fleet, with it one cluster of a fleet that others join.",
    )
    parser.add_argument("--recipe", required=True, metavar="FILE", help="recipe (YAML)")
    parser.add_argument("--cluster", metavar="NAME", help="which cluster of the topology this launcher runs")
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where the coordinator is; default: the topology's"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes to the recipe")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Run one rank and end the process: 0 when the run is complete, 2 for bad input, 1 otherwise."""
    options = arguments().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    watch = None
    try:
        recipe = Recipe.load(options.recipe, options.overrides)
        topology = recipe.fleet()
        world = find_world(
            topology,
            cluster=options.cluster,
            coordinator=options.coordinator,
            heartbeat_timeout_s=recipe.fabric.heartbeat_timeout_s,
            quorum_timeout_s=recipe.fabric.quorum_timeout_s,
        )
        watch = PeerWatch(world.cluster, world.local_rank)
        _train(recipe, world, watch)
    except (ConfigError, WorldError, FleetError) as error:
        _end(f"moe-fragment: {error}", 2 if isinstance(error, (ConfigError, WorldError)) else 1, watch)
    except KeyboardInterrupt:
        _end("moe-fragment: interrupted", 130, None)
    except Exception as error:
        place = f"cluster {watch.this.cluster}, rank {watch.this.rank}" if watch else "before joining"
        what = f"{type(error).__name__}: {error}".splitlines()[0]  # the line that `moe-fragment launch` shows
        _end(f"moe-fragment: {place}: {what}\n{traceback.format_exc()}", 1, watch)
    # Native threads of gloo and torchft may still run; leaving through the interpreter's teardown can crash in them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end(message: str, code: int, watch: PeerWatch | None) -> None:
    # Bad input is the same for all ranks of a launcher until they have joined, and of a cluster afterwards.
    first = watch.this.rank == 0 if watch is not None else os.environ.get("LOCAL_RANK", "0") == "0"
    if watch is not None and code != 130:
        watch.report(wait_s=_DYING_S if code == 1 else 0.0)  # the cause before what it led to here
    if code == 1 or first:
        sys.stderr.write(message.rstrip() + "\n")
    sys.stderr.flush()
    os._exit(code)


def _train(recipe: Recipe, world: World, watch: PeerWatch) -> None:
    if recipe.fleet().clusters[recipe.fleet().index(world.cluster)].accelerator == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from moe_fragment.train.run import ClusterRun

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    accelerator = get_accelerator()
    accelerator.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    deepspeed.init_distributed(
        dist_backend=accelerator.communication_backend_name(), auto_mpi_discovery=False, verbose=False
    )
    release_shared_buffers()
    run = ClusterRun(recipe, world, watch)
    try:
        run.train()
        watch.peers = []  # from here on others may leave in peace
    finally:
        run.close()
    world.leave()


if __name__ == "__main__":
    main()
