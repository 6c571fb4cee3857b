package kvtransfer

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxParamsBytes bounds a hand-over: some 500,000 block ids.
const MaxParamsBytes = 4 << 20

// pull is a checked kv_transfer_params object of a NIXL pull, as vLLM's P answers it:
//
//	do_remote_prefill, do_remote_decode, remote_block_ids, remote_engine_id, remote_host, remote_port, tp_size   0.9.2
//	remote_request_id, which D needs        0.13
//	remote_block_ids as one list per group  0.18
//	remote_num_tokens                       0.21
//	remote_blocks_expiry_time               0.26
//	transfer_mode                           0.28
//	dcp_size, pp_size                       0.29
//	remote_prefill_cached_tokens            0.31
//	remote_registration_generation          0.33
//
// Only the members by which D dies, hangs, or reads wrong blocks are checked; new members come with almost every
// release, and pass unread. The fields are the members' JSON text within raw, nil if absent.
type pull struct {
	raw                     []byte
	host                    []byte
	hostAt                  int // where host starts in raw
	numTokens, cachedTokens []byte
	expires                 bool // it has an expiry time of the blocks
	engine, expiry          []byte
	expiryAt, port          int  // where expiry starts in raw
	turn                    bool // it comes from a D that keeps an answer (turn.go): the two do_ members are swapped
	groups, blocks          int  // lists of block ids, and ids in them
}

// readPull checks the members that D depends on. vLLM 0.32.0 as run: a lone do_remote_prefill, string ids or missing
// members kill the decode engine, at once or when its client leaves; wrong numbers make it read another request's
// blocks.
func readPull(raw []byte) (pull, error) { return readParams(raw, false) }

// readParams is readPull, also for the object of a D that keeps an answer.
func readParams(raw []byte, turn bool) (pull, error) {
	p := pull{raw: raw, turn: turn}
	if len(raw) > MaxParamsBytes {
		return p, fmt.Errorf("%d bytes, more than %d", len(raw), MaxParamsBytes)
	}
	if !utf8.Valid(raw) { // D would refuse the client's whole body
		return p, errNotJSON
	}
	var seen pullMembers
	c := cursor{b: raw}
	if err := c.object(func(key, value []byte, at int) error { return p.member(&seen, key, value, at) }); err != nil {
		return p, err
	}
	if c.i != len(raw) {
		return p, fmt.Errorf("at byte %d: %w", c.i, errNotJSON)
	}
	if turn && seen&memberDecode == 0 {
		return p, errors.New("do_remote_decode is missing")
	}
	return p, (seen &^ memberDecode).missing()
}

// pullMembers are the required members, as bits.
type pullMembers uint8

const (
	memberPrefill pullMembers = 1 << iota
	memberBlocks
	memberEngine
	memberRequest
	memberHost
	memberPort
	memberDecode // only of a turn
	allMembers   = memberDecode - 1
)

// missing returns an error for the first absent member; remote_request_id comes last, since only it is optional in old
// releases.
func (m pullMembers) missing() error {
	if m == allMembers&^memberRequest {
		return errNoRequestID
	}
	for i, name := range [...]string{"do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id",
		"remote_host", "remote_port"} {
		if m&(1<<i) == 0 {
			return fmt.Errorf("%s is missing", name)
		}
	}
	return nil
}

// simulatorBlocks are the block ids that llm-d's simulator answers (llm-d-inference-sim). A string kills a real D; no
// real P answers one.
const simulatorBlocks = `["DUMMY_ID"]`

// member checks one member. A duplicate is refused: D might take the other one.
func (p *pull) member(seen *pullMembers, key, value []byte, at int) error {
	var is pullMembers
	var err error
	switch string(key) {
	case "do_remote_prefill":
		is, err = memberPrefill, p.flag(key, value, !p.turn)
	case "do_remote_decode":
		if p.turn {
			is, err = memberDecode, p.flag(key, value, true)
		}
	case "remote_block_ids":
		is = memberBlocks
		if string(value) == simulatorBlocks && !p.turn {
			p.groups, p.blocks = 1, 1
			break
		}
		if p.groups, p.blocks, err = checkBlockIDs(value); err != nil && !errors.Is(err, errNoBlocks) {
			err = fmt.Errorf("remote_block_ids: %w", err)
		}
	case "remote_engine_id":
		is, err = memberEngine, checkText(key, value)
		p.engine = value
	case "remote_request_id":
		is, err = memberRequest, checkText(key, value)
	case "remote_host":
		is, err = memberHost, checkText(key, value)
		p.host, p.hostAt = value, at
	case "remote_port":
		if is = memberPort; !isPort(value) {
			err = refuse(key, value, "an integer from 1 to 65535")
		}
		p.port, _ = strconv.Atoi(string(value))
	case "remote_blocks_expiry_time":
		if p.expiry != nil {
			return fmt.Errorf("%s is there twice", key)
		}
		p.expires, p.expiry, p.expiryAt = string(value) != "null", value, at
	case "remote_num_tokens":
		p.numTokens = value
	case "remote_prefill_cached_tokens":
		p.cachedTokens = value
	}
	if *seen&is != 0 {
		return fmt.Errorf("%s is there twice", key)
	}
	*seen |= is
	return err
}

func (*pull) flag(key, value []byte, want bool) error {
	if text := strconv.FormatBool(want); string(value) != text {
		return refuse(key, value, text)
	}
	return nil
}

// refuse returns an error for a member of the wrong kind. It quotes the value shortened, for logs.
func refuse(key, value []byte, want string) error {
	short, more := value, ""
	if len(short) > 32 {
		short, more = short[:32], "..."
	}
	return fmt.Errorf("%s is %q%s, not %s", key, short, more, want)
}

// checkText accepts a string that is not empty.
func checkText(key, value []byte) error {
	if len(value) < 3 || value[0] != '"' {
		return refuse(key, value, "a non-empty string")
	}
	return nil
}

func isPort(value []byte) bool {
	n, end := digits(value, 0)
	return end == len(value) && n >= 1 && n <= 65535
}

// digits reads the integer at b[i:] and returns the index behind it; end is i if there is no integer of up to ten
// digits that JSON allows. Signs, fractions and exponents are not part of it.
func digits(b []byte, i int) (n int64, end int) {
	for end = i; end < len(b) && b[end]-'0' <= 9; end++ {
		if end-i == 10 {
			return 0, i
		}
		n = n*10 + int64(b[end]-'0')
	}
	if end-i > 1 && b[i] == '0' {
		return 0, i
	}
	return n, end
}

// checkBlockIDs accepts a list of block ids (to 0.17) or a list of such lists, one for each KV cache group (from 0.18),
// with at least one id in all. vLLM's block tables are int32, so ids are from 0 to 2^31-1; a negative one would count
// from the end.
func checkBlockIDs(value []byte) (groups, ids int, err error) {
	c := cursor{b: value}
	if !c.take('[') {
		return 0, 0, errors.New("not a list")
	}
	c.space()
	nested := c.at('[')
	for first := true; ; first = false {
		more, err := c.next(first, ']')
		if err != nil {
			return groups, ids, err
		}
		if !more {
			break
		}
		n, err := c.element(nested)
		if err != nil {
			return groups, ids, err
		}
		groups, ids = groups+1, ids+n
	}
	if !nested {
		groups = 1
	}
	if ids == 0 {
		return groups, 0, errNoBlocks
	}
	return groups, ids, nil
}

// element reads a block id, or a list of them, and returns their number.
func (c *cursor) element(nested bool) (int, error) {
	if !nested {
		return 1, c.blockID()
	}
	if !c.take('[') {
		return 0, fmt.Errorf("at byte %d, something else among lists", c.i)
	}
	for n := 0; ; n++ {
		more, err := c.next(n == 0, ']')
		if err != nil || !more {
			return n, err
		}
		if err := c.blockID(); err != nil {
			return n, err
		}
	}
}

func (c *cursor) blockID() error {
	n, end := digits(c.b, c.i)
	if end == c.i || n > math.MaxInt32 {
		return fmt.Errorf("at byte %d, something that is not a block id", c.i)
	}
	c.i = end
	return nil
}

// repairHost returns the object with an address that D can reach: the configured one of P (transfer.host), or else, if
// P answers one that is only valid on its own machine, the address at which P was reached. An engine without
// VLLM_NIXL_SIDE_CHANNEL_HOST answers localhost, which on D's machine is D. Any other address is the operator's
// choice, and stays. Everything stays when P itself is on a loopback: then D is there too.
func (p pull) repairHost(prefill *Side) []byte {
	addr := prefill.Transfer.Host
	if addr == "" {
		var host string
		if json.Unmarshal(p.host, &host) != nil || !localOnly(host) {
			return p.raw
		}
		reached, err := netip.ParseAddrPort(prefill.Addr)
		if err != nil || reached.Addr().Unmap().IsLoopback() {
			return p.raw
		}
		addr = reached.Addr().Unmap().WithZone("").String() // IPv6 without brackets: vLLM adds them (make_zmq_path)
	}
	repaired := make([]byte, 0, len(p.raw)+len(addr))
	repaired = appendJSON(append(repaired, p.raw[:p.hostAt]...), []byte(addr))
	return append(repaired, p.raw[p.hostAt+len(p.host):]...)
}

// localOnly reports whether a host is valid only on its own machine: localhost, a loopback or an unspecified address.
func localOnly(host string) bool {
	host = strings.TrimSuffix(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), ".")
	if strings.EqualFold(host, "localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	addr = addr.Unmap().WithZone("")
	return addr.IsLoopback() || addr.IsUnspecified()
}
