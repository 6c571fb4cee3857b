package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

// config is what the flags say.
type config struct {
	listen          string // HTTP, host:port
	sideChannel     string // host:port; "" is the HTTP port + 1000
	advertiseHost   string // remote_host; "" is the side channel's host
	engineID        string // "" is a random UUID
	role            role
	models          []string
	connector       connector
	bootstrap       string        // host:port of the bootstrap server, of a prefill engine that has one
	transferRate    float64       // bytes/s of KV fetched; 0: as fast as it comes
	transferTimeout time.Duration // how long legs that run at once wait for each other
	dpSize          int
	heartbeat       time.Duration
	blockSize       int
	blocks          int
	maxModelLen     int
	lease           time.Duration
	prefillSpeed    float64 // tokens/s; 0 is instantaneous
	decodeStep      time.Duration
	recompute       bool // kv_load_failure_policy
	loadTimeout     time.Duration
	faithful        bool
	toolParser      bool
	record          bool
	recordCount     int
	recordBody      int
	keepAlive       time.Duration
	maxBody         int64
	fail            []failRule
	events          string // endpoint of the KV events as vLLM names it; "": none
	eventsReplay    string
	eventsTopic     string
	eventArrays     bool
	eventSteps      int
	tp              int // tensor-parallel ranks (lmcache)
	initPort        int // of LMCache's receiver, rank 0
	allocPort       int
	proxy           string // where notices go (lmcache) or the engine registers (p2p-nccl), host:port; "": nowhere
	notices         string
	kvDelay         time.Duration
	pdBuffer        int // tokens
	pdTimeout       time.Duration
	store           string // side channel of the engine that has the store
	bidirectional   bool   // nixl: answers are kept for their conversation's next turn
	decoderTTL      time.Duration
}

type role string

const (
	rolePrefill role = "prefill"
	roleDecode  role = "decode"
	roleBoth    role = "both"
	roleEncode  role = "encode"
)

func (c *config) name() string { return string(c.role) + "@" + c.listen }

// parseFlags reads the command line. flag.ErrHelp and mistakes have been reported to stderr.
func parseFlags(args []string, stderr io.Writer) (*config, error) {
	var c config
	var roleName, connectorName, policy, fail string
	f := flag.NewFlagSet("enginesim", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&c.listen, "listen", "127.0.0.1:8101", "HTTP `address`")
	f.StringVar(&c.sideChannel, "side-channel", "", "KV side-channel `address` (default: the HTTP port + 1000)")
	f.StringVar(&c.advertiseHost, "advertise-host", "", "remote_host in hand-overs (default: the side channel's host)")
	f.StringVar(&c.engineID, "engine-id", "", "engine `id` (default: random)")
	f.StringVar(&roleName, "role", "both", "prefill (kv_producer), decode (kv_consumer), both (kv_both) or encode (ec_producer)")
	f.Func("model", "served model `name`, repeatable: all names are the same model (default tiny)", func(v string) error {
		c.models = append(c.models, v)
		return nil
	})
	f.StringVar(&connectorName, "connector", "nixl", "KV connector: nixl, nixl-push, neuron, offload, trtllm, lmcache, shared, mooncake, mooncake-0.13, "+
		"moriio, moriio-read, p2p-nccl, none, or sglang for an SGLang server")
	f.IntVar(&c.tp, "tp", 1, "lmcache: tensor-parallel `ranks`, each with ports and notices of its own")
	f.IntVar(&c.initPort, "lmcache-init-port", 7300, "lmcache: pd_peer_init_port of rank 0, on decode engines")
	f.IntVar(&c.allocPort, "lmcache-alloc-port", 7400, "lmcache: pd_peer_alloc_port of rank 0, on decode engines")
	f.StringVar(&c.notices, "notices", "once", "lmcache: once, twice, never, old (LMCache 0.3.5) or noisy (among messages that are none)")
	f.DurationVar(&c.kvDelay, "kv-delay", 0, "lmcache: push so long after the prompt is computed; below 0: before the answer")
	f.IntVar(&c.pdBuffer, "pd-buffer", 0, "lmcache: `tokens` that a decode engine's buffer holds; 0: endless")
	f.DurationVar(&c.pdTimeout, "pd-allocation-timeout", 5*time.Second, "lmcache: how long an allocation waits for room")
	f.BoolVar(&c.bidirectional, "bidirectional", false, "nixl: bidirectional_kv_xfer, on prefill and decode engines (turns.go)")
	f.DurationVar(&c.decoderTTL, "decoder-ttl", 480*time.Second, "how long a decode engine keeps an answer's blocks (decoder_kv_blocks_ttl)")
	f.StringVar(&c.store, "store", "", "shared: side-channel `address` of the engine that keeps the store; empty: this one does")
	f.StringVar(&c.bootstrap, "bootstrap", "127.0.0.1:8998", "`address` of the bootstrap server (sglang and mooncake, role prefill)")
	f.DurationVar(&c.transferTimeout, "transfer-timeout", 300*time.Second, "how long legs that run at once wait for each other")
	f.StringVar(&c.proxy, "proxy", "", "`address` that notices are pushed at (lmcache) or where the engine registers (p2p-nccl); empty: nowhere")
	f.DurationVar(&c.heartbeat, "heartbeat", defaultHeartbeat, "how often it registers")
	f.IntVar(&c.dpSize, "dp-size", 1, "data-parallel ranks, as far as the bootstrap server tells of them")
	f.IntVar(&c.blockSize, "block-size", 16, "tokens in a KV block")
	f.IntVar(&c.blocks, "blocks", 1<<19, "KV blocks of the engine")
	f.IntVar(&c.maxModelLen, "max-model-len", 5_000_000, "longest prompt and answer together, tokens (a token is four bytes)")
	f.DurationVar(&c.lease, "lease", 30*time.Second, "how long a prefill engine keeps blocks (kv_lease_duration)")
	f.Float64Var(&c.prefillSpeed, "prefill-speed", 0, "tokens/s of prefill, one prompt after another; 0: instantaneous")
	f.Float64Var(&c.transferRate, "transfer-rate", 0, "nixl: bytes/s at which KV is fetched (a token has 512); 0: as fast as it comes")
	f.DurationVar(&c.decodeStep, "decode-step", 0, "time of a decode step, in which every running answer gets one token; 0: instantaneous")
	f.StringVar(&policy, "kv-load-failure", "fail", "kv_load_failure_policy: fail or recompute")
	f.DurationVar(&c.loadTimeout, "load-timeout", 5*time.Second, "what a dead side channel costs")
	f.BoolVar(&c.faithful, "faithful", false, "answer violations as vLLM does: 200 with wrong text")
	f.BoolVar(&c.toolParser, "tool-call-parser", true, "as vLLM with --enable-auto-tool-choice --tool-call-parser")
	f.BoolVar(&c.record, "record", true, "keep the last requests for GET /sim/requests")
	f.IntVar(&c.recordCount, "record-count", 1000, "how many requests to keep")
	f.IntVar(&c.recordBody, "record-body", 64<<10, "how many `bytes` of each body to keep")
	f.DurationVar(&c.keepAlive, "keep-alive", 5*time.Second, "idle HTTP connections are closed after this (uvicorn: 5 s)")
	f.Int64Var(&c.maxBody, "max-body", 256<<20, "largest request body, `bytes`")
	f.StringVar(&c.events, "kv-events", "", "publish KV events at `endpoint`: tcp://*:port binds, tcp://host:port connects, as vLLM does")
	f.StringVar(&c.eventsReplay, "kv-events-replay", "", "give out old KV events at `endpoint`, tcp://*:port")
	f.StringVar(&c.eventsTopic, "kv-events-topic", "", "`topic` of KV events")
	f.BoolVar(&c.eventArrays, "kv-events-arrays", false, "KV events as vLLM up to 0.23 sends them: arrays, and replays without a topic")
	f.IntVar(&c.eventSteps, "kv-events-buffer", 10_000, "how many batches of KV events to keep for replay")
	f.StringVar(&fail, "fail", "", "failure rule as for POST /sim/fail, or a JSON list of them")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	return &c, c.settle(roleName, connectorName, policy, fail)
}

// settle checks values and fills in what depends on others.
func (c *config) settle(roleName, connectorName, policy, fail string) error {
	var errs []error
	switch roleName {
	case "prefill", "kv_producer":
		c.role = rolePrefill
	case "decode", "kv_consumer":
		c.role = roleDecode
	case "both", "kv_both":
		c.role = roleBoth
	case "encode", "ec_producer":
		c.role = roleEncode
	default:
		errs = append(errs, fmt.Errorf("-role %q: not one of prefill, decode, both, encode", roleName))
	}
	if c.connector = connector(connectorName); !c.connector.known() {
		errs = append(errs, fmt.Errorf("-connector %q: not one of %v", connectorName, connectors()))
	}
	switch c.notices {
	case "once", "twice", "never", "old", "noisy":
	default:
		errs = append(errs, fmt.Errorf("-notices %q: not one of once, twice, never, old, noisy", c.notices))
	}
	if c.tp < 1 || c.tp > 64 {
		errs = append(errs, errors.New("-tp: between 1 and 64"))
	}
	switch policy {
	case "fail":
	case "recompute":
		c.recompute = true
	default:
		errs = append(errs, fmt.Errorf("-kv-load-failure %q: not one of fail, recompute", policy))
	}
	if c.blockSize < 1 || c.blocks < 2 || c.maxModelLen < 2 || c.blocks > 1<<30 {
		errs = append(errs, errors.New("-block-size, -blocks and -max-model-len: too small or too large"))
	}
	if len(c.models) == 0 {
		c.models = []string{"tiny"}
	}
	if err := c.settleSideChannel(); err != nil {
		errs = append(errs, err)
	}
	if fail != "" {
		var err error
		if c.fail, err = parseFailRules([]byte(fail)); err != nil {
			errs = append(errs, fmt.Errorf("-fail: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (c *config) settleSideChannel() error {
	host, port, err := net.SplitHostPort(c.listen)
	if err != nil {
		return fmt.Errorf("-listen: %w", err)
	}
	if c.sideChannel != "" {
		if host, _, err = net.SplitHostPort(c.sideChannel); err != nil {
			return fmt.Errorf("-side-channel: %w", err)
		}
	} else {
		n, err := strconv.Atoi(port)
		if err != nil || n > 65535-1000 {
			return fmt.Errorf("-listen %s: no port + 1000 for the side channel, use -side-channel", c.listen)
		}
		if n > 0 {
			n += 1000
		}
		c.sideChannel = net.JoinHostPort(host, strconv.Itoa(n))
	}
	if c.advertiseHost == "" {
		c.advertiseHost = host
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			c.advertiseHost = "localhost" // VLLM_NIXL_SIDE_CHANNEL_HOST's default, useless across hosts
		}
	}
	return nil
}

func parseFailRules(b []byte) ([]failRule, error) {
	if strings.HasPrefix(strings.TrimSpace(string(b)), "[") {
		var rules []failRule
		if err := json.Unmarshal(b, &rules); err != nil {
			return nil, err
		}
		for i := range rules {
			if err := rules[i].check(); err != nil {
				return nil, err
			}
		}
		return rules, nil
	}
	var r failRule
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, err
	}
	return []failRule{r}, r.check()
}
