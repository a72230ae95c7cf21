"""Placeholders, the pipe of late outputs, and typed media, without an engine around them."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import queue
import weakref
from typing import Any

import pytest
from packer_process import DEADLINE_S, wait_until

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine


class Dropped(queue.SimpleQueue[str]):
    """What was dropped, in the order in which it was."""

    def drop(self, output_id: str) -> None:
        self.put(output_id)


@pytest.fixture
def dropped() -> Dropped:
    return Dropped()


@pytest.fixture
def unclaimed(dropped: Dropped) -> Any:
    from worker_shim.engine.placeholders import Unclaimed

    unclaimed = Unclaimed(dropped.drop)
    yield unclaimed
    unclaimed.close()


def placeholder(output_id: str) -> Any:
    from vllm_omni.diffusion.data import DiffusionOutput

    return DiffusionOutput(async_output_id=output_id)


def test_an_output_is_dropped_once_when_its_placeholder_dies_and_not_before(unclaimed, dropped):
    first, second = placeholder("first"), placeholder("second")
    unclaimed.watch(first)
    unclaimed.watch(second)
    del first
    gc.collect()
    assert dropped.get(timeout=DEADLINE_S) == "first"
    assert len(unclaimed) == 1
    del second
    gc.collect()
    assert dropped.get(timeout=DEADLINE_S) == "second"
    assert dropped.empty()
    assert len(unclaimed) == 0


def test_whoever_drops_is_kept_by_nobody_and_needs_no_garbage_collector_to_go():
    from worker_shim.engine.placeholders import Unclaimed

    class Executor:
        def __init__(self) -> None:
            self.unclaimed = Unclaimed(self.drop)

        def drop(self, output_id: str) -> None: ...

    executor = Executor()
    gone, unclaimed = weakref.ref(executor), executor.unclaimed
    one = placeholder("one")
    unclaimed.watch(one)
    gc.disable()
    try:
        del executor
        assert gone() is None
    finally:
        gc.enable()
    del one
    wait_until(lambda: gc.collect() >= 0 and len(unclaimed) == 0, "the id is forgotten all the same")
    unclaimed.close()


def test_an_output_that_cannot_be_dropped_keeps_no_other_from_it():
    from worker_shim.engine.placeholders import Unclaimed

    class Failing(Dropped):
        def drop(self, output_id: str) -> None:
            super().drop(output_id)
            raise KeyError(output_id)

    failing = Failing()
    unclaimed = Unclaimed(failing.drop)
    for output_id in ("one", "other"):
        unclaimed.watch(placeholder(output_id))
        assert failing.get(timeout=DEADLINE_S) == output_id
    unclaimed.close()


def test_an_output_that_was_asked_for_is_not_dropped(unclaimed, dropped):
    asked, other = placeholder("asked"), placeholder("other")
    unclaimed.watch(asked)
    unclaimed.watch(other)
    assert unclaimed.take("asked")
    assert not unclaimed.take("asked")
    del asked, other
    gc.collect()
    assert dropped.get(timeout=DEADLINE_S) == "other"
    assert dropped.empty()


def test_an_error_from_a_worker_is_replaced_by_nothing_and_no_part_of_a_step_is_lost():
    from vllm_omni.diffusion.data import DiffusionOutput
    from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput

    from worker_shim.outputs.replies import in_reply, replace_in_reply

    final, error = DiffusionOutput(output=torch.ones(2)), DiffusionOutput(error="no")
    step = BatchRunnerOutput.from_list(
        [RunnerOutput("a", 1, True, final), RunnerOutput("b", 1), RunnerOutput("c", 1, True, error)]
    )
    replace_in_reply(step, lambda output: output if output.error else placeholder("id"))
    assert [part.async_output_id for part in step.runner_outputs] == ["id", None, None]
    assert step.runner_outputs[1].result is None
    assert step.runner_outputs[2].result is error
    assert list(in_reply(step)) == [step.runner_outputs[0].result, error]
    wave = {"dp_rank": 1, "output": final, "wave_id": 3}
    replace_in_reply(wave, lambda output: placeholder("id"))
    assert (wave["dp_rank"], wave["output"].async_output_id, wave["wave_id"]) == (1, "id", 3)
    for other in ({"status": "error", "error": "x", "dp_rank": 0}, True, None, [1]):
        assert list(in_reply(other)) == []
        replace_in_reply(other, lambda output: pytest.fail("there is none"))


class Opening:
    """Pickles, and opens a file that is not there where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/nowhere/at/all",)


def test_the_late_queue_times_out_while_nothing_comes_and_when_its_workers_are_gone():
    from worker_shim.engine.result_queue import LateQueue

    reader, writer = multiprocessing.Pipe(duplex=False)
    late = LateQueue(reader)
    with pytest.raises(TimeoutError):
        late.dequeue(timeout=0.01)
    writer.send_bytes(pickle.dumps("a message"))
    writer.send_bytes(pickle.dumps(Opening()))
    writer.send_bytes(pickle.dumps("another"))
    writer.close()
    assert late.dequeue(timeout=DEADLINE_S) == "a message"
    with pytest.raises(FileNotFoundError):  # of one output, and no reason to hear of no other
        late.dequeue(timeout=DEADLINE_S)
    assert late.dequeue(timeout=DEADLINE_S) == "another"
    for _ in range(2):
        with pytest.raises(TimeoutError):
            late.dequeue(timeout=0.01)
    late.close()


def test_the_size_of_an_output_is_that_of_its_tensors_also_in_a_batch_and_in_media():
    from vllm_omni.diffusion.data import DiffusionOutput
    from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput

    from worker_shim.outputs.survey import tensors_nbytes

    plain = DiffusionOutput(output={"image": torch.zeros(10), "text": "long" * 100}, trajectory_latents=torch.zeros(5))
    assert tensors_nbytes(plain) == 60
    video = DiffusionOutput(media=media())
    batch = BatchRunnerOutput.from_list([RunnerOutput("a", None, True, plain), RunnerOutput("b", None, True, video)])
    assert tensors_nbytes(batch) == 60 + 4 * 24


def media(*, prepared: bool = True, channels: int = 3) -> Any:
    from vllm_omni.diffusion.media import (
        DiffusionMediaOutput,
        VideoMediaOutput,
        VideoTensorEncoding,
        VideoTensorLayout,
        VideoTensorSpec,
        VideoValueRange,
    )

    spec = VideoTensorSpec(
        VideoTensorLayout.BCTHW, VideoTensorEncoding.NORMALIZED_FLOAT, VideoValueRange.NEGATIVE_ONE_TO_ONE
    )
    return DiffusionMediaOutput(VideoMediaOutput(torch.zeros(1, channels, 2, 2, 2), spec), prepared)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"media": {"prepared": False}}, "must be prepared"),
        ({"media": {"channels": 2}}, "must have 3 channels"),
        ({"media": {}, "output": 1}, "both media and legacy output"),
    ],
)
def test_media_that_vllm_omni_would_not_pack_or_unpack_fail_their_request(fields, message):
    from vllm_omni.diffusion.data import DiffusionOutput

    from worker_shim.outputs.replies import check_media

    check_media(DiffusionOutput(media=media()))
    output = DiffusionOutput(media=media(**fields["media"]))
    output.output = fields.get("output")
    with pytest.raises((TypeError, ValueError), match=message):
        check_media(output)


def test_the_array_of_typed_media_is_staged_and_not_pickled():
    from vllm_omni.diffusion.data import DiffusionOutput

    from worker_shim.outputs.survey import survey

    output = DiffusionOutput(media=media())
    (tensor,) = survey(output, lambda tensor: True).tensors
    assert tensor is output.media.video.tensor


def test_every_watched_id_of_ten_thousand_is_dropped_or_taken(unclaimed, dropped):
    for number in range(10_000):
        one = placeholder(str(number))
        unclaimed.watch(one)
        if number % 2:
            unclaimed.take(str(number))
    del one
    wait_until(lambda: gc.collect() >= 0 and len(unclaimed) == 0, "all are dropped")
    wait_until(lambda: dropped.qsize() == 5_000, "half of them by us")


def test_an_error_that_somebody_keeps_keeps_no_executor_in_a_cycle():
    from worker_shim.engine.pump import without_frames

    class Executor:
        pass

    def pump(executor: Executor) -> OSError:
        kept = OSError()
        try:
            try:
                raise ValueError(executor)
            except ValueError as cause:
                cause.args = ()
                raise OSError("no descriptor") from cause
        except OSError as error:
            kept = error  # as vllm-omni's pump has it in a variable
        return kept

    executor = Executor()
    gone = weakref.ref(executor)
    gc.disable()
    try:
        error = without_frames(pump(executor))
        del executor
        assert gone() is None
        assert str(error) == "no descriptor"
    finally:
        gc.enable()
