#!/usr/bin/env python3
"""Serves one of vLLM's example proxies that are Quart applications on 127.0.0.1 (as programs they listen everywhere and on ports of their
own), with one P and one D that register as engines do. usage: serve_quart.py FILE PORT REGISTER-PORT P D [WRITE|READ TP]"""
import importlib.util
import sys
import threading
import time

import msgpack
import zmq


def register(port: int, messages: list):
    sockets = []
    for message in messages:
        s = zmq.Context.instance().socket(zmq.DEALER)
        s.setsockopt(zmq.LINGER, 0)
        s.connect(f"tcp://127.0.0.1:{port}")
        sockets.append((s, msgpack.dumps(message)))
    while True:
        for s, text in sockets:
            s.send(text)
        time.sleep(1)


def main():
    file, port, register_port, p, d, *mode = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("proxy", file)
    proxy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proxy)
    proxy.start_service_discovery("127.0.0.1", int(register_port))
    messages = []
    for role, http in (("P", p), ("D", d)):
        message = {"type": role, "http_address": http, "zmq_address": "10.0.1.2:21001" if role == "P" else "10.0.0.6:22001"}
        if mode:
            message |= {"zmq_address": "host:10.0.0.5,handshake:6301,notify:61005", "dp_size": 1, "tp_size": int(mode[1]), "transfer_mode": mode[0]}
        messages.append(message)
    threading.Thread(target=register, args=(int(register_port), messages), daemon=True).start()
    while not (proxy.prefill_instances and proxy.decode_instances):
        time.sleep(0.05)
    proxy.app.run(host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    main()
