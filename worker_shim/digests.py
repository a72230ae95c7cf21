"""Written by ``python -m worker_shim.compat``: see there."""

TESTED = "0.30.0"  # vllm-omni
DIGESTS = {
    "vllm.distributed.device_communicators.shm_broadcast": {
        "ShmRingBuffer.__init__": "a834abe5064c14cb",
        "SpinCondition.wait": "097d2b1aae895a0b",
    },
    "vllm_omni.diffusion.diffusion_engine": {
        "DiffusionEngine._finalize_finished_request": "6fa5c6510b5b87df",
        "DiffusionEngine.get_output_stream": "3172402a9e0d4202",
        "DiffusionEngine.step_streaming": "30ec789e895f74f2",
    },
    "vllm_omni.diffusion.executor.multiproc_executor": {
        "MultiprocDiffusionExecutor._deliver_batch_split": "5b4041991190ec90",
        "MultiprocDiffusionExecutor._dequeue_one_with_failure_polling": "3d5a3c02bafa5cfd",
        "MultiprocDiffusionExecutor._finish_output": "cd7c635e606ba37f",
        "MultiprocDiffusionExecutor._init_executor": "a0b1fd9495bbb9eb",
        "MultiprocDiffusionExecutor._init_result_queue": "3cc013454c38c745",
        "MultiprocDiffusionExecutor._launch_workers": "70171d8a079774f4",
        "MultiprocDiffusionExecutor._result_pump": "45059bebc69ee66b",
        "MultiprocDiffusionExecutor._start_result_pump": "c7e02cb1e0e4c17f",
        "MultiprocDiffusionExecutor.describe_pending_state": "2fcb70df98dc44c6",
        "MultiprocDiffusionExecutor.drop_output": "36bc0ffe719c9596",
        "MultiprocDiffusionExecutor.execute_batch": "6fa99a873c6c378e",
        "MultiprocDiffusionExecutor.execute_request": "0d2eefa9bcce33a4",
        "MultiprocDiffusionExecutor.shutdown": "2e201042ab3f2269",
        "MultiprocDiffusionExecutor.wait_output_ready": "7a71c26872318023",
    },
    "vllm_omni.diffusion.ipc": {
        "_array_to_shm": "42fa69e206a80d09",
        "_ndarray_to_shm": "be69fdfe56fa3489",
        "_pack_tensor_if_large": "1b6080b26f8fccf8",
        "_pack_value_if_large": "ed490747f27a9c0e",
        "_tensor_to_shm": "c734977e958b1bdf",
        "pack_diffusion_output_shm": "ae548681a2369b92",
        "unpack_diffusion_output_shm": "56d69a4802f6694b",
    },
    "vllm_omni.diffusion.media": {
        "DiffusionMediaOutput.validate": "29438f2874a0e8b1",
    },
    "vllm_omni.diffusion.offloader.config": {
        "any_selected_component_uses_allgather": "89198fab70a2d57f",
    },
    "vllm_omni.diffusion.worker.diffusion_worker": {
        "DiffusionWorker.__init__": "b99ef57b5aeed86c",
        "DiffusionWorker.determine_available_kv_memory": "082048bc9097ed57",
        "WorkerProc.__init__": "107f3d5d0e3cfbd1",
        "WorkerProc._async_output_loop": "1b9f6f89fd3090a9",
        "WorkerProc._create_worker": "ca85b6106b479f0f",
        "WorkerProc._enqueue_result": "ce5a7d7fc9273f6e",
        "WorkerProc._generate_async_output_id": "2a1de613065d591e",
        "WorkerProc._return_result": "96971a5091285bdf",
        "WorkerProc.drain_async_outputs": "6d6c373b4b7bb9cc",
        "WorkerProc.shutdown": "a3fa14e8fefdc60a",
        "WorkerProc.worker_main": "086372646f257ee1",
        "WorkerWrapperBase.__init__": "ba3c680452100bcf",
    },
}
