import os
import socket
import struct
import threading

import pytest

from agent_envs.sandbox.multiplexer import CONTROL, Multiplexer

DATA = b"x" * 300_000  # more than a pipe holds


@pytest.fixture
def serve():
    """Start a multiplexer over pipes; return what writes frames to it, and the stream's end."""
    threads, ours = [], []

    def start(number, **options):
        link_in, to_link = os.pipe()
        from_link, link_out = os.pipe()
        reader, writer = os.pipe()
        control, theirs = socket.socketpair()
        streams = {number: writer, CONTROL: theirs.detach()}
        multiplexer = Multiplexer(link_in, link_out, streams, **options)
        threads.append(threading.Thread(target=multiplexer.run, daemon=True))
        threads[-1].start()
        link = os.fdopen(to_link, "wb")
        ours.extend([link, os.fdopen(from_link, "rb"), control])
        return link, os.fdopen(reader, "rb"), control

    yield start
    for end in ours:
        end.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def frame(number, data):
    return struct.pack(">BI", number, len(data)) + data


def test_a_report_comes_after_all_output_however_slowly_that_is_read(serve):
    link, output, control = serve(1, ends_with_control=False)
    link.write(frame(1, DATA) + frame(CONTROL, b"report"))
    link.close()  # the container is gone
    control.settimeout(0.2)
    with pytest.raises(TimeoutError):
        control.recv(10)
    with output:
        assert output.read() == DATA
    control.settimeout(5)
    assert control.recv(10) == b"report"


def test_input_waits_for_a_program_that_reads_slowly(serve):
    link, program, _ = serve(0, ends_with_control=True)
    link.write(frame(0, DATA) + frame(0, b""))
    link.flush()
    with program:
        assert program.read(1) + program.read() == DATA
