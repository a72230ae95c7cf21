"""Why the settings are what they are, in Markdown for docs/settings.md, which ``packer_service.settings_page`` writes.

What a setting is for says its declaration in ``packer_service.config``; the page has that in front of what stands here. A
setting needs no entry. Nothing but the page reads this.
"""

from __future__ import annotations

WHY = {
    "mode": "`managed`: a packer for the worker's GPU. `sidecar`: it connects to packers that somebody else started.",
    "fallback": (
        "With no packer to be had when the engine starts: serve through vllm-omni's `own` path after a warning, for"
        " the engine's life, or `fail`. A service that is slower is better than none; set `fail` where slower counts"
        " as broken."
    ),
    "compatibility": (
        "It is about a function of vllm-omni that the packer hooks into and that is there, but differs from the one"
        " that this release was tested with ([versions](compatibility.md#versions)). `strict`: as `fallback` says."
        " `lenient`: a warning that names the function, and the packer all the same. Strict, because a patch release"
        " may change what a function means without changing its name, and then outputs could be lost."
    ),
    "event": (
        "`timeline`: a counter in a page both registered; needs no shared namespace and survives the worker. `ipc`:"
        " a CUDA interprocess event; needs a shared /dev/shm and is slower: it is polled for, since nothing would"
        " end a wait for the event of a worker that died."
    ),
    "arena_max_bytes": (
        "Holds seven 573 MB videos in flight. An output larger than this leaves from its own allocation"
        ' ([design](design.md#staged-or-direct), "direct").'
    ),
    "arena_step_bytes": (
        "It grows by this or by twice the output that found no room, whichever is more, so that a steady load stops"
        " allocating after its first output."
    ),
    "overflow_max_bytes": "Beyond it they take vllm-omni's own path at once.",
    "min_bytes": (
        "In step mode such an output stays in the reply to its step. 0: every output goes through the packer,"
        " because on an H200 none arrives later for it: 16 KiB take 0.78 ms to the host through the packer and 1.62"
        " ms through vllm-omni's own path (where they end on the GPU), 256 KiB 0.78 and 1.54 ms"
        " ([benchmarks](benchmarks.md#hand-off)). They cost the worker's main thread more: 0.25-0.32 ms, and"
        " 0.16-0.17."
    ),
    "start_timeout_s": (
        "A start takes 0.6 s on an H200; 30 allows for a busy machine. In `sidecar` mode the engine waits as long,"
        " for all packers together, where a socket is not there yet, where nobody listens, where the one that"
        " listens is just ending, or where it may not reach one yet; pods and units may start in any order. A packer"
        " that refuses (another key, another release) is not waited for, nor is a missing key file. A worker that is"
        " ready waits as long, in either mode, for a packer that is away just then."
    ),
    "restart_wait_s": "With a 1 GiB pool one is ready in 0.6 s on an H200; the rest is for a busy machine.",
    "max_restarts": "Something is wrong then that a restart does not mend.",
    "socket": (
        "At most 107 bytes, in a directory that is its user's or root's and not writable by everybody. Workers find"
        " theirs by UUID."
    ),
    "key_file": (
        "At least 16 bytes; neither readable nor writable by everybody. Managed packers are given one through a"
        " pipe, and a socket in a directory that the engine makes in TMPDIR, else in /tmp, /var/tmp or"
        " XDG_RUNTIME_DIR."
    ),
    "wait_s": (
        "Long enough for a burst, far below any request timeout. Where the pool stayed full all the while, those"
        " behind it do not wait again until something comes back."
    ),
    "device": "N is counted in the packer's own `CUDA_VISIBLE_DEVICES`. Managed packers are given it.",
    "pool_bytes": "One 573 MB video while the next is copied. No more than `pool_max_bytes`.",
    "pool_max_bytes": (
        "It counts for all engines of this packer together. The limit is the cgroup's, else the machine's memory. A"
        " value above the whole of that is refused. A pool does not grow into the last 64 MiB that the cgroup's"
        " limit leaves to all of its processes: beyond it the kernel would kill one of them. Clean pages of files"
        " that were read (weights) count as free there. Every GPU's packer may take as much: set it where several"
        " share one machine's memory."
    ),
    "pool_step_bytes": (
        "It grows by this or by the output that found no room, whichever is more, on a background thread and ahead"
        " of need."
    ),
    "pool_idle_s": (
        "It goes to the system. A pool keeps room ready for another output as large as the largest of that time."
    ),
    "exit_after_s": "Use 0 for a unit or a sidecar.",
    "hang_s": (
        "Given up: killed and started again where it is managed. The largest copy takes a tenth of a second. Engine"
        " and workers use it too."
    ),
    "max_sessions": (
        "A session here is one engine or one worker; operators have places of their own. Connections that have not"
        " proven themselves do not count: of those there are 64 at most, beyond which the oldest of the process with"
        " the most is closed."
    ),
    "allowed_uids": "They must be able to reach the socket (mode 0660) and to read the key too.",
    "log_level": "It goes to standard error. What engine and workers say goes through vLLM's (`VLLM_LOGGING_LEVEL`).",
    "status_board": (
        "128 KiB of /dev/shm that the packer's user alone can read ([the board](operate.md#the-status-board)). Without it,"
        " and where /dev/shm has no room, `packer-service status` needs the socket and the key."
    ),
    "metrics_address": (
        "[The metrics](metrics.md). A managed packer has none by itself, because its engine's own /metrics says most of it."
        " Managed packers of several GPUs, which have one setting, take the given port plus the GPU's number. An address that"
        " cannot be had is a warning, and the packer goes on. Whoever reaches it may read the numbers: there is no password."
    ),
}
