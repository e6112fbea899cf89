"""The processes beside the first: each holds its share of every model, and follows the passes of rank 0.

rank 0    engine ─► ParallelModel ─► Ranks      loads, calls and drops, one after the other
                                       │        by a socket to each (`Told`); nothing waits in torch.distributed
rank i                               main       the same loads and calls on its own share; the layers' sums are
                                                exchanged within them, by gloo or NCCL
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed

from foredraft.errors import ForedraftError
from foredraft.models.hf.load import HFOptions, load_hf_model
from foredraft.models.hf.model import HFModel


@dataclass(frozen=True, slots=True)
class Place:
    """A rank of a group. store: the file by which its members find each other."""

    rank: int
    size: int
    store: str


@dataclass(frozen=True, slots=True)
class Load:
    """`load_hf_model`'s arguments, and the number by which the model is known."""

    model: int
    name: str
    options: HFOptions
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A method of a model that all ranks run together. Its result is rank 0's alone."""

    model: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    model: int


#: What rank 0 says.
Told = Place | Load | Call | Drop


@dataclass(frozen=True, slots=True)
class Answer:
    """It is up; it has done what it was told (of a `Place` and a `Load`); or, with a reason, it cannot go on."""

    failure: str | None = None


def join(place: Place) -> None:
    """Make this process a member of its group: NCCL between GPUs, else gloo on the loopback interface."""
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", place.rank)
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "gloo" if device is None else "nccl",
        rank=place.rank,
        world_size=place.size,
        store=torch.distributed.FileStore(place.store, place.size),  # type: ignore[attr-defined]
        device_id=device,
    )


def reason_of(error: BaseException) -> str:
    """One line."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ForedraftError) else f"{type(error).__name__}: {text}"


def main(descriptor: int) -> NoReturn:
    """Follow what the socket says, until it is closed: by rank 0, or by the system when that has ended somehow."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 may have to finish something first
        signal.signal(number, signal.SIG_IGN)
    rank0 = Connection(descriptor)
    told: SimpleQueue[Told] = SimpleQueue()
    Thread(target=_listen, args=(rank0, told), daemon=True).start()
    try:
        rank0.send(Answer())
        models: dict[int, HFModel] = {}
        while True:
            _obey(told.get(), models, rank0)
    except Exception as error:
        rank0.send(Answer(reason_of(error)))
        while True:
            signal.pause()  # rank 0 ends it, or its own end does


def _obey(told: Told, models: dict[int, HFModel], rank0: Connection) -> None:
    if isinstance(told, Call):
        getattr(models[told.model], told.method)(*told.arguments)
    elif isinstance(told, Drop):
        models.pop(told.model, None)
    elif isinstance(told, Load):
        models[told.model] = load_hf_model(told.name, told.options, **told.settings)
        rank0.send(Answer())
    else:
        join(told)
        rank0.send(Answer())


def _listen(rank0: Connection, told: SimpleQueue[Told]) -> None:
    store = ""
    try:
        while True:
            message: Told = rank0.recv()
            store = message.store if isinstance(message, Place) else store
            told.put(message)
    except (EOFError, OSError):  # rank 0 had no time to end this process, nor to clear up
        with suppress(OSError):
            os.remove(store)
            os.rmdir(os.path.dirname(store))
        os._exit(0)
    except Exception as error:  # what was sent cannot be read here
        print(reason_of(error), file=sys.stderr, flush=True)
        os._exit(1)
