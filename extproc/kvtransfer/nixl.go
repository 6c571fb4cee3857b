package kvtransfer

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"

	"tandem/extproc/openai"
	"tandem/kvstate/standstill"
)

// nixl is vLLM's NixlConnector, pull (NixlPullConnector from 0.24): P computes the prompt, keeps its blocks under a
// lease and answers with their location; D reads them from P's memory. The engines handle different layouts of P and
// D: tp_size, pp_size and dcp_size travel in the object, and with data-parallel ranks behind one port the object names
// the rank that has the blocks (remote_port, remote_engine_id).
//
// Read from vllm/distributed/kv_transfer/kv_connector/v1/nixl* of vLLM 0.9.2 to 0.33.0; run against vLLM 0.32.0.
type nixl struct {
	oneToken
	ask, yes []byte
	reuseIDs bool // D receives the token ids of P's chat template
}

// nixlAsk is P's kv_transfer_params. P tests only do_remote_decode. remote_block_ids must be falsy, or P reads from D
// (bidirectional, 0.21). vLLM's own proxies send the nulls.
const nixlAsk = `"do_remote_decode":true,"do_remote_prefill":false,` +
	`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null`

func newNIXL(reuseIDs bool) nixl {
	return nixl{oneToken: newOneToken(), ask: []byte("{" + nixlAsk + "}"), yes: []byte("true"), reuseIDs: reuseIDs}
}

func nixlDialect(o *Options) (Dialect, error) {
	d := newNIXL(o.ReuseTokenIDs)
	out := d.dialect()
	out.Engines.EitherLeg = true
	if o.ReuseTokenIDs {
		out.TokenIDs = []openai.API{openai.Chat}
	}
	if out.Lease = cmp.Or(o.Lease, standstill.DefaultLease); o.Clocks != nil {
		out.Expiry = &Expiry{Clocks: o.Clocks, Lease: out.Lease}
	}
	return out, nil
}

func (d nixl) dialect() Dialect {
	return Dialect{
		Name: "nixl", Engine: EngineVLLM, Engines: Engines{VLLM: true, DataRanks: true},
		RankRule: RankMultiples, // vLLM 0.32.0, kv_connector/utils.py, tp_ratio
		Reports: Reports{
			Connectors: []string{"NixlConnector", "NixlPullConnector"}, Alike: vllmAlike(), Release: true,
		},
		Hold: Hold{Inline: true}, Prefill: d.Prefill, ReadAnswer: d.ReadAnswer, DecodeMember: d.DecodeMember,
	}
}

func (d nixl) Prefill(r *openai.Request, p *openai.Patch, _ *Pair) {
	d.plan(r, p)
	p.Set("kv_transfer_params", openai.FieldKVTransferParams, d.ask)
	if d.reuseIDs && r.API() == openai.Chat {
		p.Set("return_token_ids", openai.FieldReturnTokenIDs, d.yes)
	}
}

// ReadAnswer reads kv_transfer_params from P's answer. null or none is not an error: the prompt ended in a state that
// keeps no blocks, or P has no connector.
func (d nixl) ReadAnswer(body []byte, pair *Pair) (Answer, error) {
	scanned, err := openai.ScanAnswer(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	a := counts(&scanned)
	a.PromptIDs = scanned.PromptIDs
	if err := a.readNIXL(scanned.Params, pair); err != nil {
		return Answer{}, err
	}
	if d.reuseIDs && a.Params != nil {
		a.addTokenIDs(scanned.PromptIDs)
	}
	return a, nil
}

// addTokenIDs puts P's prompt_token_ids into the object for D (from vLLM 0.32, chat alone): D then does not render
// messages again, so a template that prints the time makes no difference between P and D. Ids that do not fit are left
// out, and D tokenises by itself.
func (a *Answer) addTokenIDs(ids []byte) {
	if !tokenIDs(ids) || len(a.Params)+len(ids) > MaxParamsBytes-32 {
		return
	}
	open := a.Params[: len(a.Params)-1 : len(a.Params)-1]
	a.Params = append(append(append(open, `,"prompt_token_ids":`...), ids...), '}')
}

// readNIXL puts the object for D into the answer, if there is one.
func (a *Answer) readNIXL(params []byte, pair *Pair) error {
	if params == nil {
		return nil
	}
	pull, err := readPull(params)
	switch {
	case errors.Is(err, errNoRequestID) && Older(pair.Prefill.Transfer.Release, 13):
	case errors.Is(err, errNoRequestID), errors.Is(err, errNoBlocks):
		a.Unused = err.Error()
		return nil
	case err != nil:
		return fmt.Errorf("kv_transfer_params of P's answer: %w: %w", ErrParams, err)
	}
	if a.Params, err = pull.repairHost(&pair.Prefill); err != nil {
		return err
	}
	// These two are optional in the usage: messages report input_tokens without the cached ones, and engines report
	// cached tokens only with an option (0.21 and 0.31).
	if n, ok := count(pull.numTokens); ok {
		a.PromptTokens = n
	}
	if n, ok := count(pull.cachedTokens); ok {
		a.CachedTokens = n
	}
	return nil
}

// These errors do not count against a prefill endpoint: any other one of its release would give the same answer.
var (
	// vLLM 0.9.2 counts full blocks only, so a prompt shorter than a block has none. Sending it on is harmless there,
	// but kills later releases.
	errNoBlocks = errors.New("remote_block_ids: not one block id in it")
	// Before 0.13 P did not send the request's name, and D did not need it. From 0.13 on D waits for ever without it.
	errNoRequestID = errors.New("remote_request_id is missing")
)

// Older reports whether a release, such as 0.32.0, is known to be before 0.minor.
func Older(release string, minor int) bool {
	major, rest, _ := strings.Cut(strings.TrimPrefix(release, "v"), ".")
	number, _, _ := strings.Cut(rest, ".")
	n, err := strconv.Atoi(number)
	return major == "0" && err == nil && n < minor
}

// count reads an optional count; anything else is treated as absent.
func count(value []byte) (int64, bool) {
	if len(value) == 0 { // an error of strconv is two allocations
		return 0, false
	}
	n, err := strconv.ParseInt(string(value), 10, 64)
	return n, err == nil && n >= 0
}

// DecodeMember passes P's object on. Nothing else of the client's body changes on D.
func (nixl) DecodeMember(dst, params []byte) []byte { return appendKVTransferParams(dst, params) }

func appendKVTransferParams(dst, params []byte) []byte {
	return append(append(dst, `"kv_transfer_params":`...), params...)
}

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
	engine, expiry          []byte
	expiryAt, port          int // where expiry starts in raw
}

// readPull checks the members that D depends on. vLLM 0.32.0 as run: a lone do_remote_prefill, string ids or missing
// members kill the decode engine, at once or when its client leaves; wrong numbers make it read another request's
// blocks.
func readPull(raw []byte) (pull, error) {
	p := pull{raw: raw}
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
	return p, seen.missing()
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
	allMembers = 1<<iota - 1
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
		if is = memberPrefill; !isTrue(value) {
			err = refuse(key, value, "true")
		}
	case "remote_block_ids":
		is = memberBlocks
		if string(value) == simulatorBlocks {
			break
		}
		if err = checkBlockIDs(value); err != nil && !errors.Is(err, errNoBlocks) {
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
		p.expiry, p.expiryAt = value, at
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
func checkBlockIDs(value []byte) error {
	c := cursor{b: value}
	if !c.take('[') {
		return errors.New("not a list")
	}
	c.space()
	nested := c.at('[')
	ids := 0
	for first := true; ; first = false {
		more, err := c.next(first, ']')
		if err != nil {
			return err
		}
		if !more {
			break
		}
		n, err := c.element(nested)
		if err != nil {
			return err
		}
		ids += n
	}
	if ids == 0 {
		return errNoBlocks
	}
	return nil
}

// element reads a block id, or a list of them, and returns their number.
func (c *cursor) element(nested bool) (int, error) {
	if !nested {
		if err := c.blockID(); err != nil {
			return 1, err
		}
		return 1 + c.moreBlockIDs(), nil
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
		n += c.moreBlockIDs()
	}
}

// moreBlockIDs reads the block ids behind one as engines write them, after a comma or a comma and a space, and returns
// their number. It stops before all that it is not sure of: ids of more than seven digits, the last bytes of the text.
// A prompt of 100k tokens has thousands of ids, so each is read at once.
func (c *cursor) moreBlockIDs() (n int) {
	b, i := c.b, c.i
	for ; i+10 <= len(b) && b[i] == ','; n++ {
		at := i + 1
		if b[at] == ' ' {
			at++
		}
		w := binary.LittleEndian.Uint64(b[at:]) ^ ones*'0'
		other := (w&^highs + ones*(0x7F-9) | w) & highs // the high bit rises in every byte that is not a digit
		digits := bits.TrailingZeros64(other) / 8
		if digits == 0 || digits == 8 || digits > 1 && b[at] == '0' {
			break
		}
		i = at + digits
	}
	c.i = i
	return n
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
// choice, and stays. Everything stays when P itself is on a loopback: then D is there too. The error is [ErrOther].
func (p pull) repairHost(prefill *Side) ([]byte, error) {
	addr := prefill.Transfer.Host
	var host string
	text := json.Unmarshal(p.host, &host) == nil
	if prefill.Unsure && host != prefill.host() {
		return nil, fmt.Errorf("%w: it names %q", ErrOther, host)
	}
	if addr == "" {
		if !text || !localOnly(host) {
			return p.raw, nil
		}
		reached, err := netip.ParseAddrPort(prefill.Addr)
		if err != nil || reached.Addr().Unmap().IsLoopback() {
			return p.raw, nil //nolint:nilerr // an endpoint without an address has nothing to repair with
		}
		addr = reached.Addr().Unmap().WithZone("").String() // IPv6 without brackets: vLLM adds them (make_zmq_path)
	}
	repaired := make([]byte, 0, len(p.raw)+len(addr))
	repaired = openai.AppendQuoted(append(repaired, p.raw[:p.hostAt]...), []byte(addr))
	return append(repaired, p.raw[p.hostAt+len(p.host):]...), nil
}

// ErrOther says that the answer does not name the engine that was asked, and may be another's.
var ErrOther = errors.New("remote_host of P's answer is not the endpoint that was asked: another engine may have " +
	"given it (or P's VLLM_NIXL_SIDE_CHANNEL_HOST is not its own address)")

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
