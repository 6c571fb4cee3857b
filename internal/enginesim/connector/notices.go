package connector

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
)

// notifier is the PUSH socket of LMCache's proxy notifications.
type notifier struct {
	mu     sync.Mutex
	socket zmq4.Socket
}

// notify notifies the router as configured by -notices.
func (s *Node) notify(reqID string) {
	if s.cfg.Proxy == "" || s.cfg.Notices == "never" {
		return
	}
	messages := [][]byte{notice("ProxyNotif", reqID)}
	switch s.cfg.Notices {
	case "twice":
		messages = append(messages, messages[0])
	case "old": // LMCache 0.3.5
		messages[0] = notice("NixlProxyNotif", reqID)
	case "noisy":
		messages = append([][]byte{notice("AllocRequest", reqID), []byte("\xc1"), {}}, messages...)
	}
	n := &s.notifier
	n.mu.Lock()
	defer n.mu.Unlock()
	for attempt := range 2 { // the router may have restarted
		if n.socket == nil {
			n.socket = zmq4.NewPush(context.Background(), zmq4.WithDialerMaxRetries(0), zmq4.WithTimeout(time.Second))
			if err := n.socket.Dial("tcp://" + s.cfg.Proxy); err != nil {
				s.Logf("the router takes no notices: %v", err)
				_ = n.socket.Close()
				n.socket = nil
				return
			}
		}
		err := error(nil)
		for _, m := range messages {
			err = errors.Join(err, n.socket.Send(zmq4.NewMsg(m)))
		}
		if err == nil {
			return
		}
		_ = n.socket.Close()
		n.socket = nil
		if attempt == 1 {
			s.Logf("a notice was lost: %v", err)
		}
	}
}

// notice returns msgspec's msgpack of a tagged struct with one field.
func notice(kind, reqID string) []byte {
	return packText([]byte{0x82}, "type", kind, "req_id", reqID)
}

func packText(b []byte, texts ...string) []byte {
	for _, t := range texts {
		if len(t) < 32 {
			b = append(b, 0xa0|byte(len(t)))
		} else {
			b = append(b, 0xd9, byte(len(t)))
		}
		b = append(b, t...)
	}
	return b
}

// close closes the socket.
func (n *notifier) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.socket != nil {
		_ = n.socket.Close()
		n.socket = nil
	}
}
