"""Training state on disk: written beside the training, whole or not at all, and checked before it is used.

    layout, host, staging   tensors -> files of a snapshot -> host memory shared with the writer process
    worker, files, folder   the writer process; bytes, checksums and fsync; which snapshots exist and verify
    remote                  the same snapshots on object storage
    state, ranks, signals   what belongs to a snapshot; what the ranks agree on; being asked to stop
    snapshots               all of it behind one object

files, folder, manifest, worker and remote import no torch: the writer process starts quickly and stays small.
"""
