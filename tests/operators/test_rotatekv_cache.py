"""RotateKV caches: errors when they are made, written and read, and caches that share nothing."""

import json
import os
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hstu_sparse import RotateKVCache, rotatekv_compress, rotatekv_decompress, rotatekv_round_trip
from hstu_sparse.cache import files
from hstu_sparse.core.launch import INTERPRET
from tests.operators.test_rotatekv import make


def forge(path, change, tensors=lambda x: None):
    """Rewrite a cache's file with other facts or tensors, and the checksum that belongs to them."""
    with safe_open(path, framework="pt") as file:
        facts, entries = json.loads(file.metadata()["facts"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts = change(facts) or facts
    tensors(entries)
    text = json.dumps(facts)
    save_file(entries, path, {"format": files.FORMAT, "facts": text, "sha256": files.checksum(text, entries)})


@pytest.mark.parametrize(
    ("change", "tensors", "message"),
    [
        (lambda facts: facts["format"].update(sparsity=0.55), lambda x: None, "k_bitmap must keep"),
        (lambda facts: None, lambda x: x["0.k_bitmap"].zero_(), "k_bitmap must keep 32 channels of every token"),
        (lambda facts: None, lambda x: x["0.k_bitmap"].bitwise_not_(), "k_bitmap must keep"),
        (lambda facts: None, lambda x: x["0.k_ranges"].fill_(float("nan")), "k_ranges has NaN or infinity"),
        (lambda facts: None, lambda x: x.update(lengths=torch.tensor(7)), "lengths must be"),
        (lambda facts: facts["format"].update(heads=2.0), lambda x: None, "heads must be a whole number, got 2.0"),
        (lambda facts: facts["format"].update(value_size=-1), lambda x: None, "value_size must be at least 1"),
        (lambda facts: facts["format"].update(dtype="nn"), lambda x: None, "dtype must be floating point, got nn"),
        (lambda facts: facts["format"].update(head_size=10**30), lambda x: None, "head_size must be at most"),
        (lambda facts: [1], lambda x: None, "the metadata must have exactly"),
    ],
)  # fmt: skip
def test_forged_file_is_refused_in_one_line(tmp_path, change, tensors, message):
    """Change a file and give it a valid checksum, as other code could."""
    path = tmp_path / "cache"
    rotatekv_compress(*make(), sparsity=0.5).save(path)
    forge(path, lambda facts: None)
    RotateKVCache.load(path)
    forge(path, change, tensors)
    with pytest.raises(ValueError, match=message) as caught:
        RotateKVCache.load(path)
    assert "\n" not in str(caught.value)


def test_a_cache_keeps_its_own_channel_order():
    k, v, offsets = make()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))[None]
    cache = rotatekv_compress(k, v, offsets, channel_order=order)
    before = rotatekv_decompress(cache)
    order.copy_(order.flip(1))
    assert all(torch.equal(x, y) for x, y in zip(rotatekv_decompress(cache), before))


@pytest.mark.parametrize("options", [{}, {"sink_tokens": 9}, {"sparsity": 0.5}])
def test_nan_is_not_saved(tmp_path, options):
    k, v, offsets = make()
    k[1] = float("nan")
    cache = rotatekv_compress(k, v, offsets, **options)
    with pytest.raises(ValueError, match="has NaN or infinity"):
        cache.save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def test_an_infinity_comes_back_as_no_number():
    k, v, offsets = make()
    v[1] = float("inf")
    assert rotatekv_decompress(rotatekv_compress(k, v, offsets))[1][1].isnan().all()


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "folder"])
def test_only_files_are_written_and_read(tmp_path, kind):
    """The device is tested through a link, so that a failing test would replace the link and not the device."""
    path, cache = tmp_path / "cache", rotatekv_compress(*make())
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(os.devnull)
    with pytest.raises(OSError, match="is not a regular file"):
        cache.save(path)
    with pytest.raises(ValueError, match="is not a regular file"):
        RotateKVCache.load(path)
    assert path.exists() and not path.is_file()


def test_threads_save_to_one_path(tmp_path):
    """The file is whole, that of one of the threads, and there is no other file."""
    caches = [rotatekv_compress(*make((size, 3, 5, 7))) for size in (20, 200, 40, 100)]
    path, start, failed = tmp_path / "cache", threading.Barrier(4), []

    def save(cache):
        start.wait()
        try:
            for _ in range(5):
                cache.save(path)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert RotateKVCache.load(path).nbytes in [cache.nbytes for cache in caches]
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("name", "bits", "backend"),
    [("k", 8, "reference"), ("v", 8, "reference"), ("k", 2, "reference"), ("k", 8, "triton")],
)
@pytest.mark.parametrize("size", [1e6, 1e-7])
def test_what_does_not_fit_in_fp16_scales_is_refused(size, name, bits, backend):
    if backend == "triton" and not INTERPRET:
        pytest.skip("kernels on a CPU need TRITON_INTERPRET=1")
    k, v, offsets = make((3, 2))
    inputs = {"k": k, "v": v} | {name: size * {"k": k, "v": v}[name]}
    message = (
        f"{name} must fit in fp16 scales" if size > 1 else f"{name} must have magnitudes of at least .* scale it up"
    )
    for function in (rotatekv_compress, rotatekv_round_trip):
        with pytest.raises(ValueError, match=message):
            function(**inputs, seq_offsets=offsets, bits=bits, backend=backend)
        function(**inputs, seq_offsets=offsets, bits=bits, sink_tokens=3, backend=backend)  # sinks are not quantised
    cache = rotatekv_compress(k, v, offsets, bits=bits)
    before = rotatekv_decompress(cache)
    with pytest.raises(ValueError, match=message):
        cache.append(**inputs, seq_offsets=offsets, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(rotatekv_decompress(cache), before))


@pytest.mark.parametrize("size", [0.0, 2e-3, 1.0, 1e4])
def test_what_fits_comes_back_as_close_as_codes_are(size):
    k, v, offsets = make()
    for restored, x in zip(rotatekv_round_trip(size * k, size * v, offsets, bits=8), (size * k, size * v)):
        assert (restored - x).norm() <= 0.02 * x.norm()
