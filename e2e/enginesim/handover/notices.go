package handover

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"
)

// Notifier is the PUSH socket of LMCache's proxy notifications.
type Notifier struct {
	Proxy   string // host:port of the router; "": it gets none
	Notices string // once, twice, never, old or noisy, as -notices says
	Logf    func(format string, args ...any)

	mu     sync.Mutex
	socket zmq4.Socket
}

// Notify notifies the router.
func (n *Notifier) Notify(reqID string) {
	if n.Proxy == "" || n.Notices == "never" {
		return
	}
	messages := [][]byte{notice("ProxyNotif", reqID)}
	switch n.Notices {
	case "twice":
		messages = append(messages, messages[0])
	case "old": // LMCache 0.3.5
		messages[0] = notice("NixlProxyNotif", reqID)
	case "noisy":
		messages = append([][]byte{notice("AllocRequest", reqID), []byte("\xc1"), {}}, messages...)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for attempt := range 2 { // the router may have restarted
		if n.socket == nil {
			n.socket = zmq4.NewPush(context.Background(), zmq4.WithDialerMaxRetries(0), zmq4.WithTimeout(time.Second))
			if err := n.socket.Dial("tcp://" + n.Proxy); err != nil {
				n.Logf("the router takes no notices: %v", err)
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
			n.Logf("a notice was lost: %v", err)
		}
	}
}

// notice returns msgspec's msgpack of a tagged struct with one field.
func notice(kind, reqID string) []byte {
	text, _ := msgpack.Marshal(struct { // which cannot fail
		Type  string `msgpack:"type"`
		ReqID string `msgpack:"req_id"`
	}{kind, reqID})
	return text
}

// Close closes the socket.
func (n *Notifier) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.socket != nil {
		_ = n.socket.Close()
		n.socket = nil
	}
}
