package notices

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
)

// MaxID is the largest accepted length of a req_id, in bytes. Ours have 32.
const MaxID = 128

var errNotANotice = errors.New("not a notice")

// Parse parses one message: a msgpack map with "type" and "req_id", in any order and among other members. The type
// is NixlProxyNotif in LMCache 0.3.5 and ProxyNotif from 0.3.7; any type with that ending is accepted.
// AllocRequest, CancelNotif and LMCache's other messages are not notifications.
func Parse(message []byte) (id string, err error) {
	d := msgpack.NewDecoder(bytes.NewReader(message))
	n, err := d.DecodeMapLen()
	if err != nil || n < 2 || n > 64 {
		return "", errNotANotice
	}
	var kind string
	for range n {
		key, err := d.DecodeString()
		if err != nil {
			return "", fmt.Errorf("a key of a notice: %w", err)
		}
		switch key {
		case "type":
			kind, err = d.DecodeString()
		case "req_id":
			id, err = d.DecodeString()
		default:
			err = d.Skip()
		}
		if err != nil {
			return "", fmt.Errorf("%.40q of a notice: %w", key, err)
		}
	}
	switch {
	case !strings.HasSuffix(kind, "ProxyNotif"):
		return "", errNotANotice
	case id == "" || len(id) > MaxID:
		return "", fmt.Errorf("a req_id of %d bytes: %w", len(id), errNotANotice)
	}
	return id, nil
}
