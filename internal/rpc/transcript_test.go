package rpc

import (
	"testing"
	"testing/synctest"
)

// transcripts are conversations with the server, frame by frame. `<` is what it answers; lines without are the peer's. Between
// two answers the peer waits for nothing.
var transcripts = []struct{ name, text string }{
	// One stream.
	{"a call: headers, one message, the answer and its end; the half of the peer is closed, so nothing is reset", `
HEADERS 1 /t/echo
DATA 1 hello END
< HEADERS 1 status=200
< DATA 1 hello
< HEADERS 1 grpc-status=0 END`},
	{"the handler ends before the peer does: it need not go on", `
HEADERS 1 /t/once
DATA 1 hello
< HEADERS 1 status=200
< DATA 1 re hello
< HEADERS 1 grpc-status=0 END
< RST 1 NO_ERROR
DATA 1 more
RST 1`},
	{"messages one by one", `
HEADERS 1 /t/echo
DATA 1 a
< HEADERS 1 status=200
< DATA 1 a
DATA 1 b
DATA 1 c
< DATA 1 b
< DATA 1 c
BYTES 1 - END
< HEADERS 1 grpc-status=0 END`},
	{"a message in pieces of bytes, and two in one frame", `
HEADERS 1 /t/collect
BYTES 1 00
BYTES 1 000000
BYTES 1 0361
BYTES 1 6263
BYTES 1 00000000020a0b000000000000000000017a END
< HEADERS 1 status=200
< DATA 1 4 of 6
< HEADERS 1 grpc-status=0 END`},
	{"padding is no part of a message", `
HEADERS 1 /t/echo
PADDED 1 a END
< HEADERS 1 status=200
< DATA 1 a
< HEADERS 1 grpc-status=0 END`},
	{"trailers of the peer's end its half", `
HEADERS 1 /t/collect
DATA 1 a
HEADERS 1 - x=y END
< HEADERS 1 status=200
< DATA 1 1 of 1
< HEADERS 1 grpc-status=0 END`},
	{"no message at all", `
HEADERS 1 /t/collect END
< HEADERS 1 status=200
< DATA 1 0 of 0
< HEADERS 1 grpc-status=0 END`},
	{"the end in the middle of a message", `
HEADERS 1 /t/collect
BYTES 1 0000000002 END
< HEADERS 1 status=200 grpc-message=the stream ended in the middle of a message grpc-status=13 END`},
	{"a unary call", `
HEADERS 1 /t/say
DATA 1 x END
< HEADERS 1 status=200
< DATA 1 said x
< HEADERS 1 grpc-status=0 END`},
	{"an error, before any message of the answer: a message of printable ASCII", `
HEADERS 1 /t/fails
DATA 1 5 END
< HEADERS 1 status=200 grpc-message=100%25 so: %C3%A9 grpc-status=5 END`},
	{"an error that is none of gRPC's", `
HEADERS 1 /t/fails
DATA 1 x END
< HEADERS 1 status=200 grpc-message=strconv.Atoi: parsing "x": invalid syntax grpc-status=2 END`},
	{"metadata", `
HEADERS 1 /t/meta in=a in=b END
< HEADERS 1 status=200 h=a h=b i=x
< HEADERS 1 grpc-status=0 t=a+b END`},
	{"what the codec cannot read", `
HEADERS 1 /t/echo
DATA 1 unreadable END
< HEADERS 1 status=200 grpc-message=reading a message: as it says grpc-status=13 END`},

	// What is refused.
	{"an unknown method", `
HEADERS 1 /t/nothing END
< HEADERS 1 status=200 grpc-message=unknown method /t/nothing grpc-status=12 END
HEADERS 3 /t/nothing
< HEADERS 3 status=200 grpc-message=unknown method /t/nothing grpc-status=12 END
< RST 3 NO_ERROR`},
	{"a compressed message", `
HEADERS 1 /t/echo
BYTES 1 010000000161
< HEADERS 1 status=200 grpc-message=compressed messages are not taken here grpc-status=12 END
< RST 1 NO_ERROR`},
	{"a message that is too large, as soon as it says so", `
HEADERS 1 /t/echo
BYTES 1 0000400001
< HEADERS 1 status=200 grpc-message=a message of 4194305 bytes is larger than the 4194304 that are taken grpc-status=8 END
< RST 1 NO_ERROR`},
	{"what is no gRPC", `
HEADERS 1 - :method=GET :scheme=http :path=/ END
< HEADERS 1 status=405 END
HEADERS 3 - :method=POST :scheme=http :path=/t/echo content-type=application/json END
< HEADERS 3 status=415 END
HEADERS 5 - :method=POST :scheme=http :path=/t/echo grpc-timeout=1x content-type=application/grpc+proto END
< HEADERS 5 status=400 END`},
	{"what is no HTTP/2 costs the stream", `
HEADERS 1 /t/echo Upper=x
< RST 1 PROTOCOL_ERROR
HEADERS 3 - :method=POST :scheme=http content-type=application/grpc
< RST 3 PROTOCOL_ERROR
HEADERS 5 /t/echo connection=close
< RST 5 PROTOCOL_ERROR
HEADERS 7 /t/echo :path=/
< RST 7 PROTOCOL_ERROR
HEADERS 9 /t/collect
DATA 9 a
HEADERS 9 - :path=/ END
< RST 9 PROTOCOL_ERROR
HEADERS 11 /t/collect
DATA 11 a
HEADERS 11 - more=x
< RST 11 PROTOCOL_ERROR
HEADERS 13 /t/wait
DATA 13 a END
DATA 13 a
< RST 13 STREAM_CLOSED
HEADERS 15 - grpc-timeout=1S :method=POST :scheme=http :path=/t/echo content-type=application/grpc
< RST 15 PROTOCOL_ERROR`},

	// Endings.
	{"the peer's deadline, while the handler waits", `
HEADERS 1 /t/echo grpc-timeout=2S
DATA 1 a
< HEADERS 1 status=200
< DATA 1 a
PASS 1999ms
PING
< PING pingping ACK
PASS 1ms
PING
< HEADERS 1 grpc-status=4 grpc-message=the caller's deadline has passed END
< RST 1 NO_ERROR
< PING pingping ACK`},
	{"the peer's deadline, before a handler began", `
HEADERS 1 /t/echo grpc-timeout=100u
PASS 1ms
PING
< HEADERS 1 status=200 grpc-message=the caller's deadline has passed grpc-status=4 END
< RST 1 NO_ERROR
< PING pingping ACK`},
	{"a reset ends the handler's wait", `
HEADERS 1 /t/echo
DATA 1 a
< HEADERS 1 status=200
< DATA 1 a
RST 1
HEADERS 3 /t/wait
DATA 3 a
RST 3
PING
< PING pingping ACK`},
	{"a stream that is idle is not to be reset", `
RST 1
< GOAWAY 0 PROTOCOL_ERROR
< HANGS UP`},
	{"an id that was passed over is gone", `
HEADERS 5 /t/echo END
< HEADERS 5 status=200 grpc-status=0 END
HEADERS 3 /t/echo END
< GOAWAY 5 STREAM_CLOSED
< HANGS UP`},

	// Flow control, this way.
	{"a message larger than the stream's window comes in parts, however slow the handler is", `
SETTINGS INITIAL=4
HEADERS 1 /t/once
DATA 1 hello END
< SETTINGS ACK
< HEADERS 1 status=200
< DATA 1 (4 bytes)
WINDOW 1 1
< DATA 1 (1 bytes)
WINDOW 1 100
< DATA 1 (8 bytes)
< HEADERS 1 grpc-status=0 END`},
	{"the window may be made smaller than what was sent, and then be negative", `
SETTINGS INITIAL=20
HEADERS 1 /t/echo
DATA 1 0123456789
DATA 1 0123456789
< SETTINGS ACK
< HEADERS 1 status=200
< DATA 1 0123456789
< DATA 1 (5 bytes)
SETTINGS INITIAL=5
WINDOW 1 15
< SETTINGS ACK
WINDOW 1 1
< DATA 1 (1 bytes)
SETTINGS INITIAL=1000
< SETTINGS ACK
< DATA 1 (9 bytes)`},
	{"the connection's window holds up all streams, and then none", `
SETTINGS INITIAL=100000
HEADERS 1 /t/push
DATA 1 1x40000 END
< SETTINGS ACK
< HEADERS 1 status=200
< DATA 1 (16384 bytes)
< DATA 1 (16384 bytes)
< DATA 1 (7237 bytes)
< HEADERS 1 grpc-status=0 END
HEADERS 3 /t/push
DATA 3 1x40000 END
HEADERS 7 /t/fails
DATA 7 1 END
< HEADERS 3 status=200
< DATA 3 (16384 bytes)
< DATA 3 (9146 bytes)
< HEADERS 7 status=200 grpc-message=100%25 so: %C3%A9 grpc-status=1 END
WINDOW 0 14475
< DATA 3 (14475 bytes)
< HEADERS 3 grpc-status=0 END
HEADERS 9 /t/echo
DATA 9 a
< HEADERS 9 status=200
WINDOW 0 2147483647
< DATA 9 a`},
	{"a window that is too large", `
WINDOW 0 2147483647
< GOAWAY 0 FLOW_CONTROL_ERROR
< HANGS UP`},
	{"a stream's window that is too large", `
HEADERS 1 /t/echo
WINDOW 1 2147483647
< RST 1 FLOW_CONTROL_ERROR
HEADERS 3 /t/echo
WINDOW 3 0
< RST 3 PROTOCOL_ERROR
HEADERS 5 /t/echo
WINDOW 5 10
SETTINGS INITIAL=2147483647
< GOAWAY 5 FLOW_CONTROL_ERROR
< HANGS UP`},

	// Frames.
	{"a header block over several frames", `
BEGUN 1 /t/echo END
CONTINUATION 1 a=b
CONTINUATION 1 c=d END
< HEADERS 1 status=200 grpc-status=0 END`},
	{"nothing may come in between", `
BEGUN 1 /t/echo
PING
< GOAWAY 0 PROTOCOL_ERROR
< HANGS UP`},
	{"a header block that does not go on with anything", `
BEGUN 1 /t/echo
FRAME 9 0 1
< GOAWAY 0 ENHANCE_YOUR_CALM
< HANGS UP`},
	{"frames that are unknown, and settings", `
FRAME 99 255 7 00ff
SETTINGS OTHER=7
GOAWAY
< SETTINGS ACK
ACK
PRIORITY 1 3`},
	{"priorities that are wrong", `
PRIORITY 1 1
< RST 1 PROTOCOL_ERROR
FRAME 2 0 1 00
< RST 1 FRAME_SIZE_ERROR
FRAME 2 0 0 0000000000
< GOAWAY 0 PROTOCOL_ERROR
< HANGS UP`},
	{"data of no stream", `
DATA 1 a
< GOAWAY 0 PROTOCOL_ERROR
< HANGS UP`},
	{"padding longer than the frame", `
HEADERS 1 /t/echo
FRAME 0 8 1 0500
< GOAWAY 1 PROTOCOL_ERROR
< HANGS UP`},
	{"headers that are no HPACK", `
FRAME 1 4 1 ff
< GOAWAY 0 COMPRESSION_ERROR
< HANGS UP`},
	{"a promise", `
FRAME 5 4 1 00000002
< GOAWAY 0 PROTOCOL_ERROR
< HANGS UP`},
	{"streams are the peer's: odd", `
HEADERS 2 /t/echo
< GOAWAY 0 PROTOCOL_ERROR
< HANGS UP`},
	{"settings that are wrong", `
SETTINGS FRAME=1
< GOAWAY 0 PROTOCOL_ERROR
< HANGS UP`},

	// Time.
	{"a peer that answers stays; one that does not is left", `
PASS 30s
< PING alive?` + "\x00\x00" + `
PASS 9s
ANSWER alive?` + "\x00\x00" + `
PASS 29s
PING
< PING pingping ACK
PASS 31s
< PING alive?` + "\x00\x00" + `
PASS 10s
< HANGS UP`},
}

func TestTranscripts(t *testing.T) {
	for _, c := range transcripts {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, Options{})
				p := newRawPeer(t, s.pipe(t, 1<<20))
				p.play(hello)
				p.play(c.text)
				_ = p.nc.Close()
				s.end(t)
			})
		})
	}
}
