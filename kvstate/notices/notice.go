package notices

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
)

// MaxID is the longest req_id that is taken, in bytes. Ours have 32.
const MaxID = 128

var errNotANotice = errors.New("not a notice")

// Parse reads one message: a msgpack map with "type" and "req_id", in any order and beside anything else. The type is
// NixlProxyNotif in LMCache 0.3.5 and ProxyNotif from 0.3.7; whatever ends like that will do. AllocRequest, CancelNotif
// and what else LMCache has are no notices.
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
