"""Read a published version as an engine does: seals, size, checksum, then a read-only mapping."""

import mmap
import os

import xxhash

from asyncrl.core.errors import WeightsCorrupt
from asyncrl.weights.held_version import compare_checksums, open_segment, size_of


def map_segment(bucket, *, version, index):
    descriptor = open_segment(bucket, version=version, index=index)
    try:
        view = memoryview(mmap.mmap(descriptor, bucket.size, prot=mmap.PROT_READ))
        compare_checksums(xxhash.xxh3_64_intdigest(view), bucket.checksum, version=version, index=index)
        return view
    finally:
        os.close(descriptor)


def read_manifest(manifest):
    for index, bucket in enumerate(manifest.buckets):
        view = map_segment(bucket, version=manifest.version, index=index)
        for spec in bucket.tensors:
            end = spec.offset + size_of(spec)
            if end > bucket.size:
                raise WeightsCorrupt(f"{spec.name} ends at byte {end}", version=manifest.version, bucket=index)
            yield spec, view[spec.offset : end]


def weights_of(publication):
    """Tensors of a publication by name; the publication is released."""
    import torch

    with publication:
        return {
            spec.name: torch.frombuffer(bytearray(view), dtype=getattr(torch, spec.dtype)).view(spec.shape)
            for spec, view in read_manifest(publication.manifest)
        }
