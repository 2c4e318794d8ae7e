"""From a profile and a seed to the events of a run."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tests.simulator.chance import Chance
from tests.simulator.device import CopyFault
from tests.simulator.events import Abort, Event, Fault, FaultKind, ModelLoad, Moment, Reset, Send
from tests.simulator.profiles import AnyFault, Profile
from tests.simulator.tiers import TierFault
from tests.simulator.words import VOCABULARY

NUM_FAULTY_COPIES = 200
"""Copies of a rank among which the faulty ones are chosen."""
NUM_FAULTY_OPERATIONS = 120
"""The same of its tiers."""


def make_events(profile: Profile, seed: int) -> list[Event]:
    """The events of a run, requests first. `profile`: the kind of run; `seed`: which one."""
    chance = Chance(f"events/{seed}")
    requests = _make_requests(profile, chance)
    return [
        *requests,
        *_make_aborts(profile, chance, requests),
        *_make_resets(profile, chance),
        *_make_model_loads(profile, chance),
        *_make_faults(profile, chance),
    ]


def events_of(events: Sequence[Event], seed: int, engine: int, num_engines: int) -> list[Event]:
    """What happens to one of several engines: each request goes to any of them.

    `events`: of all of them; `seed`: of the run; `engine`: which one; `num_engines`: how many there
    are.
    """
    chance = Chance(f"engines/{seed}")
    names = (event.request if isinstance(event, Abort) else event.name for event in events)
    return [
        event
        for event, name in zip(events, names, strict=True)
        if chance.below(num_engines, name) == engine
    ]


def _make_requests(profile: Profile, chance: Chance) -> list[Send]:
    workload = profile.workload
    stems = []
    for index in range(workload.num_stems):
        stream = chance.stream("stem", index)
        length = stream.randint(8, workload.stem_tokens)
        stems.append([stream.randrange(VOCABULARY) for _ in range(length)])
    requests: list[Send] = []
    for index in range(workload.num_requests):
        stream = chance.stream("request", index)
        stem = stems[stream.randrange(len(stems))]
        kept = len(stem) if stream.random() < 0.5 else stream.randint(4, len(stem))
        tail_seed = chance.stream("tail", stream.randrange(workload.num_tails))
        tail = [
            tail_seed.randrange(VOCABULARY) for _ in range(stream.randint(1, workload.tail_tokens))
        ]
        prompt = [*stem[:kept], *tail]
        if stream.random() < workload.whole_blocks:
            block_tokens = profile.shape.block_words
            prompt = prompt[: max(len(prompt) // block_tokens, 1) * block_tokens]
        salt = stream.randrange(workload.num_salts)
        requests.append(
            Send(
                f"r{index}",
                stream.randrange(workload.num_steps),
                f"r{index}",
                tuple(prompt),
                stream.randint(1, workload.output_tokens),
                priority=stream.randrange(3) if profile.shape.is_priority else 0,
                salt=f"s{salt}" if salt else None,
                params=_make_params(stream) if workload.has_wishes else None,
            )
        )
    return _with_reused_ids(requests, workload.num_reused_ids, chance)


def _make_params(stream: Random) -> dict[str, Any] | None:
    """What a client asks for beside its tokens: half of them nothing."""
    kind = stream.choice(("pin", "pin", "nothing", "hint", *[""] * 4))
    if kind == "pin":
        return {"pin_s": stream.choice((0, 1, 5, 20, 60))}
    if kind == "nothing":
        return {"store": "nothing"}
    if kind == "hint":
        action = {
            "action_type": stream.choice(("kv.fetch", "kv.retain", "kv.demote", "kv.share")),
            "action_version": "1.0",
            "payload": {"ttl_s": stream.choice((0, 3, 30))},
        }
        return {"kv_hints": {"protocol_version": "0.1", "actions": [action]}}
    return None


def _with_reused_ids(requests: Sequence[Send], count: int, chance: Chance) -> list[Send]:
    ordered = sorted(requests, key=lambda send: (send.step, int(send.name[1:])))
    for index in range(min(count, len(ordered) // 2)):
        first = chance.below(len(ordered) // 2, "reused", index)
        again = chance.between(len(ordered) // 2, len(ordered) - 1, "again", index)
        send = ordered[again]
        ordered[again] = replace(send, request_id=ordered[first].request_id)
    return ordered


def _make_aborts(profile: Profile, chance: Chance, requests: Sequence[Send]) -> list[Event]:
    moments = list(Moment)
    return [
        Abort(
            f"a{index}",
            chance.choose(requests, "abort", index).name,
            chance.choose(moments, "moment", index),
            chance.below(3, "abort delay", index),
        )
        for index in range(chance.between(0, profile.workload.num_aborts, "aborts"))
    ]


def _make_resets(profile: Profile, chance: Chance) -> list[Event]:
    def reset(index: int) -> Reset:
        is_running = chance.happens(0.3, "reset running", index)
        return Reset(
            f"x{index}",
            chance.below(profile.workload.num_steps, "reset", index),
            connector=chance.happens(0.5, "reset connector", index),
            running=is_running,
            is_paused=is_running and chance.happens(0.5, "reset paused", index),
        )

    return [
        reset(index) for index in range(chance.between(0, profile.workload.num_resets, "resets"))
    ]


def _make_model_loads(profile: Profile, chance: Chance) -> list[Event]:
    return [
        ModelLoad(
            f"w{index}",
            chance.below(profile.workload.num_steps, "model load", index),
            is_late=chance.happens(0.5, "late model load", index),
        )
        for index in range(chance.between(0, profile.workload.num_model_loads, "model loads"))
    ]


def _make_faults(profile: Profile, chance: Chance) -> list[Event]:
    kinds: list[AnyFault] = []
    for kind, most in profile.faults.items():
        kinds += [kind] * chance.between(0, most, "faults", kind.value)
    share = 8 if profile.has_few_copies else 1
    limits: dict[type[AnyFault], int] = {
        CopyFault: NUM_FAULTY_COPIES // share,
        TierFault: NUM_FAULTY_OPERATIONS // share,
        FaultKind: profile.workload.num_steps,
    }
    return [
        Fault(
            f"f{index}",
            kind,
            chance.below(profile.shape.num_ranks, "fault rank", index),
            chance.below(limits[type(kind)], "fault number", index),
            chance.between(1, 12, "fault amount", index),
        )
        for index, kind in enumerate(kinds)
    ]
