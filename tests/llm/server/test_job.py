import asyncio

import pytest

from fullstride.llm.outputs import Delta
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.server.errors import ApiError, EngineFailedError, UnavailableError
from fullstride.llm.server.job import EngineJob, EnginePrompt


def _job(n: int = 1) -> EngineJob:
    return EngineJob([EnginePrompt((1, 2), SamplingParams(n=n)), EnginePrompt((3,), SamplingParams(n=n))], ["a", "b"])


async def _read(job: EngineJob) -> tuple[list[tuple[int, str]], ApiError | None]:
    found = []
    try:
        async for which, delta in job:
            found.append((which, delta.text))
    except ApiError as error:
        return found, error
    return found, None


def test_it_ends_when_all_completions_have():
    job = _job(n=2)
    assert (job.completions, job.prompt_tokens) == (4, 3)
    for request_id, index in (("a", 0), ("b", 1), ("b", 0), ("a", 1)):
        assert not job.ended
        job.put(Delta(request_id, index, (7, 8), "x"))
        job.put(Delta(request_id, index, (9,), "y", finish_reason="stop", cached_tokens=1))
    assert job.ended
    found, error = asyncio.run(_read(job))
    assert (len(found), error, job.generated_tokens, job.cached_tokens) == (8, None, 12, 2)
    assert [which for which, _ in found] == [0, 0, 1, 1, 1, 1, 0, 0]


def test_cached_tokens_are_those_of_a_prompts_first_completion():
    job = _job(n=2)
    for request_id, index, cached in (("a", 1, 0), ("a", 0, 16), ("a", 1, 0), ("b", 0, 8)):
        job.put(Delta(request_id, index, (7,), "x", cached_tokens=cached))
    assert job.cached_tokens == 24


def test_the_first_error_comes_after_what_came_before_it():
    job, first = _job(), EngineFailedError("first")
    job.put(Delta("a", 0, (7,), "x"))
    job.fail(first)
    job.fail(UnavailableError("second"))
    assert asyncio.run(_read(job)) == ([(0, "x")], first)


def test_an_error_after_the_end_changes_nothing():
    job = EngineJob([EnginePrompt((1,), SamplingParams())], ["a"])
    job.put(Delta("a", 0, (7,), "x", finish_reason="length"))
    job.fail(EngineFailedError("late"))
    assert asyncio.run(_read(job)) == ([(0, "x")], None)


def test_waiting_for_the_first_delta():
    async def wait(job: EngineJob) -> None:
        waiting = asyncio.create_task(job.begun())
        await asyncio.sleep(0)
        assert not waiting.done()
        job.put(Delta("a", 0, (7,), "x"))
        await waiting
        assert await anext(job) == (0, Delta("a", 0, (7,), "x"))
        failing = asyncio.create_task(job.begun())
        await asyncio.sleep(0)
        job.fail(EngineFailedError("why"))
        with pytest.raises(EngineFailedError, match="why"):
            await failing

    asyncio.run(wait(_job()))
