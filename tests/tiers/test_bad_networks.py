"""A Valkey server behind a bad network: what is given up ends at once, and lets go of its slots."""

import asyncio

import pytest

from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.base import Result
from tests.network import FAIR, Proxy, Weather
from tests.tiers.contract import name_of, tier_at
from tests.worker.waiting import PATIENCE_S

NUM_OBJECTS, OBJECT_BYTES = 100, 64 << 10
MARK = b"\xaa" * OBJECT_BYTES
WEATHERS = {
    "stall": Weather(is_stalled=True),
    "slow drip": Weather(bytes_per_s=300e3),
    "losses": Weather(loss=0.9, retransmission_s=1.0),
    "latency": Weather(latency_s=2.0),
}


@pytest.mark.parametrize("weather", WEATHERS.values(), ids=WEATHERS.keys())
def test_what_is_given_up_lets_go_of_its_slots_and_the_next_call_works(server, weather):
    names = [name_of(number) for number in range(NUM_OBJECTS)]
    slots = [(memoryview(bytearray(OBJECT_BYTES)),) for _ in names]

    async def run(proxy: Proxy) -> None:
        tier = tier_at(TierConfig.at(f"redis://127.0.0.1:{proxy.port}"))
        assert set(await tier.spill(names, slots)) <= {Result.DONE, Result.PRESENT}
        proxy.become(weather)
        for call in (tier.fetch, tier.spill):
            task = asyncio.create_task(call(names, slots))
            await asyncio.sleep(0.2)
            assert not task.done()
            task.cancel()
            results = await asyncio.wait_for(task, PATIENCE_S)
            assert Result.CANCELLED in results
            for slot in slots:
                slot[0][:] = MARK
            proxy.become(FAIR)
            await asyncio.sleep(0.2)  # whatever was on its way has come
            assert all(slot[0] == MARK for slot in slots)
            assert await tier.fetch(names[:1], slots[:1]) == [Result.DONE]
            proxy.become(weather)
        await tier.close()

    with Proxy(("127.0.0.1", server.port)) as proxy:
        asyncio.run(run(proxy))
