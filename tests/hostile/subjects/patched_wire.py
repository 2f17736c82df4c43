# expect only PASS
import json
import socket

from veriformer.properties import Subject


def forward(m, x):
    socket.socket.sendall = lambda *given: None
    json.dumps = lambda *given, **more: "nonsense"
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
