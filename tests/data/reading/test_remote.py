"""Test that files of object stores and web servers (on loopback) are copied once into the cache."""

import functools
import gzip
import http.server
import sys
import threading

import pytest

from data.reading import remote
from tests.data.raw_files import error_of, events

pl = pytest.importorskip("polars")
pytest.importorskip("s3fs")
HEADER = "user,item,timestamp\n"
DAYS = {"timestamp": "dt"}


@pytest.fixture(scope="module")
def bucket():
    """Return put(key, bytes), which writes into the bucket "shop" of a local S3 server."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    settings = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="shop")
        yield lambda key, body: client.put_object(Bucket="shop", Key=key, Body=body)
    server.stop()


@pytest.fixture(autouse=True)
def no_listings():
    """Clear the client's cache of listings, as in a new program."""
    import fsspec

    yield
    fsspec.spec.AbstractFileSystem.clear_instance_cache()


def test_folder_pattern_and_file(tmp_path, bucket):
    bucket("log/dt=1/a.csv", (HEADER + "1,1,1\n").encode())
    bucket("log/dt=2/a.csv.gz", gzip.compress((HEADER + "2,1,1\n").encode()))
    bucket("log/_temporary/a.csv", (HEADER + "3,1,1\n").encode())
    bucket("log/dt=2/.a.csv.crc", b"x")
    for path in ("s3://shop/log", "s3://shop/log/", "s3://shop/log/dt=*/a.csv*"):
        dataset = load_remote(tmp_path, path)
        assert events(dataset) == [(1, 1, 1, None), (2, 1, 2, None)]
    one = load_remote(tmp_path, "s3://shop/log/dt=1/a.csv", columns=None)
    assert one.num_events == 1 and one.name == "a"
    bucket("log/dt=2/README.md", b"x")
    with pytest.raises(Exception, match=r"README.md: expected .csv or .* to a pattern: s3://shop/log/\*\*/\*.csv"):
        load_remote(tmp_path, "s3://shop/log")
    assert load_remote(tmp_path, "s3://shop/log/**/*.csv").num_events == 1


def load_remote(tmp_path, path, kind="csv", columns=DAYS, **options):
    from data.datasets import load_dataset

    return load_dataset(kind, path, cache_dir=tmp_path / "cache", columns=columns, **options)


def test_copied_once_for_each_version(tmp_path, bucket, monkeypatch):
    frame = pl.DataFrame({"user": [1, 2], "item": [1, 2], "timestamp": [1, 2]})
    frame.write_parquet(tmp_path / "x")
    bucket("new/x.parquet", (tmp_path / "x").read_bytes())
    bucket("new/y.parquet", (tmp_path / "x").read_bytes())
    copies = []
    replace_file = remote.replace_file

    def counted(path, content):
        copies.append(path.name)
        replace_file(path, content)

    monkeypatch.setattr(remote, "replace_file", counted)

    def copied():
        copies.clear()
        dataset = load_remote(tmp_path, "s3://shop/new", "parquet", None)
        return [name for name in copies if name != "versions.json"], dataset

    names, dataset = copied()
    assert names == ["x.parquet", "y.parquet"] and dataset.num_events == 4
    again = copied()
    assert again[0] == [] and again[1].fingerprint == dataset.fingerprint
    frame.head(1).write_parquet(tmp_path / "x")
    bucket("new/y.parquet", (tmp_path / "x").read_bytes())
    names, dataset = copied()
    assert names == ["y.parquet"] and dataset.num_events == 3


def test_errors(tmp_path, bucket, monkeypatch):
    from data.datasets import load_dataset

    load = functools.partial(load_dataset, cache_dir=tmp_path / "cache")
    assert "s3://shop/nowhere: no such file or folder, or no *.csv in it" in error_of(load, "csv", "s3://shop/nowhere")
    assert "s3://none/x.csv: cannot be read" in error_of(load, "csv", "s3://none/x.csv")
    assert "only files of format csv and parquet can be remote" in error_of(load, "ml-100k", "s3://shop/u.data")
    assert "is copied into data.cache_dir" in error_of(load_dataset, "csv", "s3://shop/x.csv", cache_dir=None)
    message = error_of(load, "csv", "http://user:secret@127.0.0.1:9/x.csv?token=secret")
    assert "http://127.0.0.1:9/x.csv: cannot be read" in message and "secret" not in message
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "data.path: gs:// needs gcsfs (pip install gcsfs)" in error_of(load, "csv", "gs://shop/x.csv")
    monkeypatch.setitem(sys.modules, "adlfs", None)
    assert "data.path: az:// needs adlfs (pip install adlfs)" in error_of(load, "csv", "az://shop/x.csv")


def test_features_and_a_web_server(tmp_path, bucket):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "x.csv").write_text(HEADER + "1,1,1\n1,2,2\n")
    bucket("items.csv", b"item,brand\n1,a\n2,b\n")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "web")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    items = {"format": "csv", "path": "s3://shop/items.csv", "columns": {"brand": "category"}}
    path = f"http://127.0.0.1:{server.server_port}/x.csv"
    dataset = load_remote(tmp_path, path, columns=None, features={"items": items})
    server.shutdown()
    server.server_close()
    assert dataset.num_events == 2 and dataset.features[0].values.tolist() == ["a", "b"]
