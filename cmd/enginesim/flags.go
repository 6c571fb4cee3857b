package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"tandem/e2e/enginesim/api"
	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/fault"
	"tandem/e2e/enginesim/handover"
)

// errVersion means that only the version was asked for.
var errVersion = errors.New("-version: print the version and exit")

// parseFlags reads the command line. It reports errors, and flag.ErrHelp, to stderr; errVersion it only returns.
func parseFlags(args []string, stderr io.Writer) (*api.Config, error) {
	var c api.Config
	var roleName, connectorName, policy, fail string
	f := flag.NewFlagSet("enginesim", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&c.Listen, "listen", "127.0.0.1:8101", "HTTP `address`")
	f.IntVar(&c.Hosts, "hosts", 1, "run so many engines, alike: each on the next IP address, at the same ports")
	f.StringVar(&c.SideChannel, "side-channel", "", "KV side-channel `address` (default: the HTTP port + 1000)")
	f.StringVar(&c.AdvertiseHost, "advertise-host", "", "remote_host in hand-overs (default: the side channel's host)")
	f.StringVar(&c.EngineID, "engine-id", "", "engine `id` (default: random)")
	f.StringVar(&roleName, "role", "both",
		"prefill (kv_producer), decode (kv_consumer), both (kv_both) or encode (ec_producer)")
	f.Func("model", "served model `name`, repeatable: all names are the same model (default tiny)",
		func(v string) error {
			c.Models = append(c.Models, v)
			return nil
		})
	f.StringVar(&connectorName, "connector", string(connector.NIXL),
		fmt.Sprintf("KV connector, one of %v; with sglang it is an SGLang server", connector.Names()))
	connectorFlags(f, &c)
	engineFlags(f, &c)
	f.StringVar(&policy, "kv-load-failure", "fail", "kv_load_failure_policy: fail or recompute")
	f.DurationVar(&c.LoadTimeout, "load-timeout", 5*time.Second, "what a dead side channel costs")
	f.BoolVar(&c.Faithful, "faithful", false, "answer violations as vLLM does: 200 with wrong text")
	f.BoolVar(&c.Reasoning, "reasoning", false,
		"the first tokens of streamed chats and messages are reasoning, as vLLM's --reasoning-parser finds it")
	f.BoolVar(&c.BeginsAnew, "begin-anew", false,
		"ignore kv_transfer_params.prompt_token_ids, as vLLM before 0.32: it continues nobody's answer")
	f.DurationVar(&c.FirstLogprobs, "first-logprobs", 0,
		"how long the core compiles, and stands still, for the first request with log probabilities (vLLM: 2 to 25 s)")
	f.BoolVar(&c.OldForced, "old-forced-tools", false, "refuse forced tools with one token, as vLLM before 0.18")
	f.BoolVar(&c.ToolParser, "tool-call-parser", true, "as vLLM with --enable-auto-tool-choice --tool-call-parser")
	f.BoolVar(&c.Record, "record", true, "keep the last requests for GET /sim/requests")
	f.IntVar(&c.RecordCount, "record-count", 1000, "how many requests to keep")
	f.IntVar(&c.RecordBody, "record-body", 64<<10, "how many `bytes` of each body to keep")
	f.DurationVar(&c.KeepAlive, "keep-alive", 5*time.Second,
		"idle HTTP connections are closed after this (uvicorn: 5 s)")
	f.Int64Var(&c.MaxBody, "max-body", 256<<20, "largest request body, `bytes`")
	eventFlags(f, &c)
	f.DurationVar(&c.Warmup, "warmup", 0, "how long the open HTTP port answers 503 to everything, /health too")
	frontFlags(f, &c)
	f.StringVar(&fail, "fail", "", "failure rule as for POST /sim/fail, or a JSON list of them")
	if err := parseAll(f, args); err != nil {
		return nil, err
	}
	c.DevMode = os.Getenv("VLLM_SERVER_DEV_MODE") == "1" // as vLLM
	return &c, settle(&c, roleName, connectorName, policy, fail)
}

// connectorFlags are those of single connectors.
func connectorFlags(f *flag.FlagSet, c *api.Config) {
	f.IntVar(&c.Tp, "tp", 1, "lmcache: tensor-parallel `ranks`, each with ports and notices of its own")
	f.IntVar(&c.Pd.InitPort, "lmcache-init-port", 7300, "lmcache: pd_peer_init_port of rank 0, on decode engines")
	f.IntVar(&c.Pd.AllocPort, "lmcache-alloc-port", 7400, "lmcache: pd_peer_alloc_port of rank 0, on decode engines")
	f.StringVar(&c.Notices, "notices", "once",
		"lmcache: once, twice, never, old (LMCache 0.3.5) or noisy (among other messages)")
	f.DurationVar(&c.KvDelay, "kv-delay", 0,
		"lmcache: push so long after the prompt is computed; below 0: so long before the answer")
	f.IntVar(&c.Pd.Chunk, "lmcache-chunk", 256, "lmcache: `tokens` of a chunk (chunk_size)")
	f.IntVar(&c.Pd.Buffer, "pd-buffer", 0, "lmcache: `tokens` that a decode engine's buffer holds; 0: endless")
	f.DurationVar(&c.Pd.Timeout, "pd-allocation-timeout", 5*time.Second,
		"lmcache: how long an allocation waits for room")
	f.BoolVar(&c.Bidirectional, "bidirectional", false,
		"nixl: bidirectional_kv_xfer, on prefill and decode engines")
	f.DurationVar(&c.DecoderTTL, "decoder-ttl", 480*time.Second,
		"how long a decode engine keeps an answer's blocks (decoder_kv_blocks_ttl)")
	f.StringVar(&c.Store, "store", "",
		"shared: side-channel `address` of the engine that keeps the store; empty: this one does")
	f.StringVar(&c.Bootstrap, "bootstrap", "127.0.0.1:8998",
		"`address` of the bootstrap server (sglang and mooncake, role prefill)")
	f.DurationVar(&c.TransferTimeout, "transfer-timeout", 300*time.Second,
		"how long legs that run at once wait for each other")
	f.StringVar(&c.Proxy, "proxy", "",
		"lmcache: `address` that notices are pushed at; empty: nowhere")
}

// engineFlags are those of memory and speed.
func engineFlags(f *flag.FlagSet, c *api.Config) {
	f.IntVar(&c.DpSize, "dp-size", 1, "data-parallel `ranks` behind the HTTP port; their other ports are the next ones")
	f.IntVar(&c.BlockSize, "block-size", 16, "tokens in a KV block")
	f.StringVar(&c.KVDtype, "kv-cache-dtype", "auto", "of the KV cache")
	f.StringVar(&c.Revision, "revision", "", "of the model: engines of two revisions have other weights")
	f.IntVar(&c.Blocks, "blocks", 1<<19, "KV blocks of the engine")
	f.IntVar(&c.HostBlocks, "host-blocks", 0, "KV blocks of CPU memory behind them; 0: none")
	f.Float64Var(&c.LoadRate, "load-rate", 0, "bytes/s of KV from there (a token has 512); 0: instantaneous")
	f.IntVar(&c.MaxModelLen, "max-model-len", 5_000_000,
		"longest prompt and answer together, tokens (a token is four bytes)")
	f.DurationVar(&c.Lease, "lease", 30*time.Second, "how long a prefill engine keeps blocks (kv_lease_duration)")
	f.Float64Var(&c.PrefillSpeed, "prefill-speed", 0, "tokens/s of prefill, one prompt after another; 0: instantaneous")
	f.Float64Var(&c.TransferRate, "transfer-rate", 0,
		"nixl: bytes/s at which KV is fetched (a token has 512); 0: as fast as it comes")
	f.IntVar(&c.Chunk, "chunk", 0,
		"`tokens` of a prompt in a step: answers wait for the end of the step, it for theirs, and prompts for memory "+
			"until it is their turn (not where both legs run at once); 0: nobody waits")
	f.DurationVar(&c.DecodeStep, "decode-step", 0,
		"time of a decode step, in which every running answer gets one token; 0: instantaneous")
}

// eventFlags are those of KV events.
func eventFlags(f *flag.FlagSet, c *api.Config) {
	f.StringVar(&c.Events, "kv-events", "",
		"publish KV events at `endpoint`: tcp://*:port binds, tcp://host:port connects, as vLLM does")
	f.StringVar(&c.EventsReplay, "kv-events-replay", "", "give out old KV events at `endpoint`, tcp://*:port")
	f.StringVar(&c.EventsTopic, "kv-events-topic", "", "`topic` of KV events")
	f.BoolVar(&c.EventArrays, "kv-events-arrays", false,
		"KV events as vLLM up to 0.23 sends them: arrays, and replays without a topic")
	f.IntVar(&c.EventSteps, "kv-events-buffer", 10_000, "how many batches of KV events to keep for replay")
}

// frontFlags are the flags of what stands before an engine's routes.
func frontFlags(f *flag.FlagSet, c *api.Config) {
	f.StringVar(&c.Front.Key, "api-key", "", "paths below /v1, and /server_info, want this `key`, as a bearer token")
	f.BoolVar(&c.Front.Uncounted, "uncounted", false,
		"metrics say no tokens of answers, and no times between them, as TensorRT-LLM's")
	f.BoolVar(&c.Front.Origins, "cors", false, "answer CORS preflights, and allow any origin")
	f.BoolVar(&c.Front.Forms, "forms", false,
		"as behind a proxy that compresses, cuts and answers conditional requests where headers ask for it")
	f.StringVar(&c.Front.CertFile, "tls-cert", "", "PEM `file`: speak TLS")
	f.StringVar(&c.Front.KeyFile, "tls-key", "", "PEM `file` of its key")
	f.StringVar(&c.Front.Name, "tls-name", "", "the only SNI and Host that are taken")
}

// parseAll parses the arguments, which are all flags.
func parseAll(f *flag.FlagSet, args []string) error {
	showVersion := f.Bool("version", false, "print the version and exit")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *showVersion {
		return errVersion
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	return nil
}

// settle checks values and sets those that depend on others.
func settle(c *api.Config, roleName, connectorName, policy, fail string) error {
	var errs []error
	switch roleName {
	case "prefill", "kv_producer":
		c.Role = engine.RolePrefill
	case "decode", "kv_consumer":
		c.Role = engine.RoleDecode
	case "both", "kv_both":
		c.Role = engine.RoleBoth
	case "encode", "ec_producer":
		c.Role = engine.RoleEncode
	default:
		errs = append(errs, fmt.Errorf("-role %q: not one of prefill, decode, both, encode", roleName))
	}
	if c.Connector = connector.Name(connectorName); !c.Connector.Known() {
		errs = append(errs, fmt.Errorf("-connector %q: not one of %v", connectorName, connector.Names()))
	}
	switch c.Notices {
	case "once", "twice", "never", "old", "noisy":
	default:
		errs = append(errs, fmt.Errorf("-notices %q: not one of once, twice, never, old, noisy", c.Notices))
	}
	if c.Tp < 1 || c.Tp > 64 {
		errs = append(errs, errors.New("-tp: between 1 and 64"))
	}
	switch policy {
	case "fail":
	case "recompute":
		c.Recompute = true
	default:
		errs = append(errs, fmt.Errorf("-kv-load-failure %q: not one of fail, recompute", policy))
	}
	if c.BlockSize < 1 || c.Blocks < 2 || c.MaxModelLen < 2 || c.Blocks > 1<<30 {
		errs = append(errs, errors.New("-block-size, -blocks and -max-model-len: too small or too large"))
	}
	if len(c.Models) == 0 {
		c.Models = []string{"tiny"}
	}
	if err := settleSideChannel(c); err != nil {
		errs = append(errs, err)
	}
	if fail != "" {
		var err error
		if c.Fail, err = fault.Parse([]byte(fail)); err != nil {
			errs = append(errs, fmt.Errorf("-fail: %w", err))
		}
	}
	return errors.Join(errs...)
}

func settleSideChannel(c *api.Config) error {
	host, port, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return fmt.Errorf("-listen: %w", err)
	}
	if c.SideChannel != "" {
		if host, _, err = net.SplitHostPort(c.SideChannel); err != nil {
			return fmt.Errorf("-side-channel: %w", err)
		}
	} else {
		n, err := strconv.Atoi(port)
		if err != nil || n > 65535-1000 {
			return fmt.Errorf("-listen %s: no port + 1000 for the side channel, use -side-channel", c.Listen)
		}
		if n > 0 {
			n += 1000
		}
		c.SideChannel = net.JoinHostPort(host, strconv.Itoa(n))
	}
	if c.AdvertiseHost == "" {
		c.AdvertiseHost = host
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			c.AdvertiseHost = "localhost" // VLLM_NIXL_SIDE_CHANNEL_HOST's default, useless across hosts
		}
	}
	return nil
}

// hosts returns the configurations of all engines of the process.
func hosts(first *api.Config) (all []*api.Config, err error) {
	if first.Hosts < 1 || first.Hosts > 1 && first.EngineID != "" {
		return nil, errors.New("-hosts: at least 1, and without -engine-id if there are more")
	}
	peers := handover.NewPeers() // or there would be a connection for each two engines
	for n := range first.Hosts {
		c := *first
		c.Peers = peers
		for _, addr := range []*string{&c.Listen, &c.SideChannel} {
			if *addr, err = above(*addr, n); err != nil {
				return nil, err
			}
		}
		if first.Hosts > 1 {
			c.AdvertiseHost, _, _ = net.SplitHostPort(c.SideChannel)
		}
		all = append(all, &c)
	}
	return all, nil
}

// above returns the same port of the nth host from an address on.
func above(addr string, n int) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || n == 0 {
		return addr, err
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return "", fmt.Errorf("-hosts counts from IP addresses: %w", err)
	}
	for range n {
		ip = ip.Next()
	}
	return net.JoinHostPort(ip.String(), port), nil
}
