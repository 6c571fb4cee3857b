// Command bench measures Tandem's cost, beside the least possible cost of the same work, in one run and on one
// machine.
//
//	go run ./e2e/bench [flags]
//
// The floor is a plain Envoy with one route, through which the client itself makes the two requests of a disaggregated
// answer: the prefill body to P, then the decode body, with the KV parameters of P's answer, to D. Beside it stands
// Tandem with the Envoy of `tandem envoy`: the client sends one request. Engines (cmd/enginesim, which answer at
// once), client, and number of Envoy workers are the same for both, and both make the same two hops; the difference is
// the price of deciding and of rewriting.
//
// It measures the CPU time of the Envoy and of the Tandem process per request, with the kernel's clock of a process
// (nanoseconds, all threads), and the time from a request's first byte to its answer's last. Rounds of all stacks are
// interleaved, because the speed of a machine changes within a minute; where tokens take their time, all stacks have
// their rounds at once. A ratio is the median of the ratios within rounds. Compare figures of one run only.
//
// More than two stacks can run side by side, to compare settings and patches:
//
//	go run ./e2e/bench -variant 'gogc: GOGC=400' -variant 'buffered: body=buffered' \
//	    -variant 'patched: bin=/tmp/tandem'
//
// So can other routers in their P/D modes (-vllm-router, -smg, -llm-d; `make bench-peers` installs them),
// with and without an Envoy in front.
//
// The output is Markdown. The program imports nothing of Tandem: it knows the binaries and the configuration file.
//
// What a request costs with 1, 4 or 16 replicas and a Redis is measured by
//
//	go run ./e2e/bench -fleet 1,4,16 -rate 200 -shapes json1k -rounds 3
//
// How long a small request waits for large ones on the same connections of Envoy to Tandem, with its 99.9th percentile:
//
//	go run ./e2e/bench -shapes json1k -clients 1,16,64,256 -rate 200 -requests 2000 -rounds 3 -beside json1m
//
// Long prompts over many engines that publish KV events, all stacks at one rate (`make bench-long`):
//
//	go run ./e2e/bench -shapes json400k -clients 64 -rate 20 -requests 200 -rounds 3 -endpoints 100 -kv-events \
//	    -documents 200 -idle 10s
//
// How much later the first token comes through each stack, with one client and at half of what the stack can serve:
//
//	go run ./e2e/bench -first -shapes sse16 -rounds 5 -variant 'redis: redis=yes'
//
// What one replica serves with many endpoints and open streams, and what the limit is (`make capacity`):
//
//	go run ./e2e/bench -capacity 10,100,1000 -streams 64,512,4096 -shapes json1k -clients 1,16,64 -rounds 3 -idle 5s
//
// With -json FILE the figures are compared with those of the last run, and kept for the next one and for
// docs/benchmarks.md (last.go).
//
// Files: stack.go starts the stacks, client.go is the client, shapes.go the requests, rounds.go the measuring,
// report.go the tables, ledger/ the engines' counts at the end, peers.go and dynamo.go other routers, first.go the
// time to the first token, fleet.go several replicas, endpoints.go many endpoints, capacity.go what the most is.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"tandem/e2e/bench/ledger"
	"tandem/e2e/process"
)

func main() {
	runtime.LockOSThread() // processes die with the thread that started them (Pdeathsig), and this thread lasts
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the values of the flags.
type options struct {
	shapes     []shape
	clients    []int
	rounds     int
	requests   int
	rate       float64
	tokenTime  time.Duration
	workers    int
	documents  int           // that prompts begin with; 0: every prompt is new
	endpoints  int           // of each model
	events     bool          // they publish KV events, and Tandem reads them
	idle       time.Duration // for which all stacks are measured without requests
	envoy, bin string
	profiles   string
	variants   []variant // the first is called tandem
	peers      []peer
	beside     shape // of requests that run all the time beside the measured ones; zero: none
	last       string
	mode       mode
}

// mode is another kind of measurement than rounds of requests.
type mode struct {
	fleet []int // numbers of replicas, of fleet.go
	pin   bool  // every process on one processor
	first bool  // of first.go
	// of capacity.go: numbers of endpoints, and of streams that are open
	capacity, streams []int
}

func parse(args []string, stderr io.Writer) (options, error) {
	o, base := options{}, variant{name: "tandem"}
	o.clients, o.mode.streams = []int{1, 16}, []int{64, 512, 4096}
	var shapes, env, beside string
	var fresh bool
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(stderr)
	list := func(to *[]int, name, usage string) {
		f.Func(name, usage, func(s string) (err error) { *to, err = numbers(s); return err })
	}
	f.StringVar(&shapes, "shapes", "json1k,json220k,json1m,sse256",
		"`list` of request shapes; sse256 and sse1024 (not in the default) are a token each -token-time, "+
			"sse256burst (neither) all at once")
	f.DurationVar(&o.tokenTime, "token-time", 5*time.Millisecond,
		"how long a token takes in streams: 5 ms is a fast engine's; with less than 1 ms stacks have their rounds "+
			"in turn")
	list(&o.clients, "clients", "`list` of how many clients send at the same time (default 1,16)")
	f.IntVar(&o.rounds, "rounds", 15, "rounds of each shape, number of clients, and stack")
	f.IntVar(&o.requests, "requests", 0, "requests in a round; 0: about a second's worth")
	f.Float64Var(&o.rate, "rate", 0, "requests a second of all clients together; 0: each sends when it has its answer")
	f.IntVar(&o.workers, "workers", 2, "Envoy's --concurrency, for every stack")
	f.BoolVar(&fresh, "fresh", false,
		"every prompt is new from its first word on; else only its end is, as in a conversation")
	f.IntVar(&o.documents, "documents", 1, "prompts begin with one of so many documents, in turn")
	f.IntVar(&o.endpoints, "endpoints", 2, "engines of each model, half of them for prefill")
	f.BoolVar(&o.events, "kv-events", false, "engines publish KV events (on all addresses), which Tandem reads")
	f.DurationVar(&o.idle, "idle", 0, "first measure all stacks without requests for so long")
	f.StringVar(&base.bodyMode, "body-mode", "duplex",
		"envoy.bodyMode of Tandem's configuration: auto, buffered or duplex")
	f.StringVar(&env, "tandem-env", "", "more environment for tandem, as `NAME=VALUE ...`")
	f.StringVar(&base.binary, "tandem", "", "tandem `binary` (default: the one built)")
	f.Func("variant", "one more stack of Tandem, as `name: SETTING ...`; a setting is body=MODE, bin=FILE, "+
		"redis=yes (a Redis of its own, whose CPU counts with Tandem's), replicas=N, usage=yes, record=yes, "+
		"binding=immediate, inside=FOLDER (of libtandem.so), insured=yes (its streams outlive engines), or environment",
		func(v string) error {
			added, err := parseVariant(v)
			o.variants = append(o.variants, added)
			return err
		})
	list(&o.mode.fleet, "fleet", "measure these `numbers` of replicas with one Redis instead, at -rate requests a "+
		"second of the first shape (fleet.go)")
	f.BoolVar(&o.mode.pin, "pin", false, "in the fleet mode: Envoy on the first processor, and all replicas on the "+
		"second, so that no replica's threads wake each other (Linux, two processors)")
	f.BoolVar(&o.mode.first, "first", false, "measure what each stack adds to the first token instead, of the first "+
		"shape (first.go)")
	list(&o.mode.capacity, "capacity", "measure what one replica serves with these `numbers` of endpoints "+
		"instead, of the first shape (capacity.go)")
	list(&o.mode.streams, "streams", "in this mode: `numbers` of open streams (default 64,512,4096)")
	f.StringVar(&beside, "beside", "", "shape of requests that are sent beside the measured ones, "+
		strconv.Itoa(besideRate)+" a second: what small requests wait for large ones")
	f.StringVar(&o.last, "json", "", "`file` with the figures of earlier runs (docs/figures/*.json): compare, then "+
		"replace what was measured again; go test ./docs -update writes docs/benchmarks.md from it")
	peers := peerFlags(f)
	f.StringVar(&o.bin, "bin", "", "`directory` with tandem and enginesim (default: built for this run)")
	f.StringVar(&o.envoy, "envoy", "", "Envoy `binary` (default: $ENVOY, envoy on PATH, .tools/bin/envoy)")
	f.StringVar(&o.profiles, "cpuprofile", "",
		"after each shape's rounds, profile every Tandem under the same load for 5 s, into this `directory`")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	base.env, o.peers = strings.Fields(env), peers()
	if fresh {
		o.documents = 0
	}
	o.variants = append([]variant{base}, o.variants...)
	for i := range o.variants {
		v := &o.variants[i]
		v.bodyMode, v.binary = cmp.Or(v.bodyMode, base.bodyMode), cmp.Or(v.binary, base.binary)
	}
	if err := o.name(shapes, beside); err != nil {
		return o, err
	}
	return o, o.check()
}

// name finds the shapes that are named, and the one beside them; "": none is.
func (o *options) name(shapes, beside string) (err error) {
	if beside != "" {
		if o.beside, err = findShape(beside); err != nil {
			return err
		}
	}
	for name := range strings.SplitSeq(shapes, ",") {
		s, err := findShape(name)
		if err != nil {
			return err
		}
		o.shapes = append(o.shapes, s)
	}
	return nil
}

// check checks the numbers.
func (o *options) check() error {
	if len(o.mode.fleet) > 0 && o.rate <= 0 {
		return errors.New("-fleet needs a -rate")
	}
	if o.endpoints < 2 || o.endpoints%2 != 0 || o.documents < 0 {
		return errors.New("-endpoints is an even number above 0, -documents a number above 0")
	}
	if len(o.clients) == 0 || o.rounds < 1 || o.workers < 1 || o.requests < 0 || o.rate < 0 || o.tokenTime <= 0 {
		return errors.New("-clients, -rounds, -workers, -requests and -rate are numbers, -token-time a time")
	}
	return nil
}

// numbers reads a list such as 1,16.
func numbers(list string) (out []int, err error) {
	for text := range strings.FieldsFuncSeq(list, func(r rune) bool { return r == ',' }) {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q is not a number above 0", text)
		}
		out = append(out, n)
	}
	return out, nil
}

// parseVariant reads `name: body=duplex bin=/tmp/tandem GOGC=400`.
func parseVariant(text string) (variant, error) {
	name, settings, ok := strings.Cut(text, ":")
	v := variant{name: strings.TrimSpace(name)}
	if !ok || v.name == "" || v.name == floorName {
		return v, fmt.Errorf("%q is not `name: SETTING ...`", text)
	}
	for s := range strings.FieldsSeq(settings) {
		key, value, ok := strings.Cut(s, "=")
		switch {
		case !ok:
			return v, fmt.Errorf("%q is not NAME=VALUE", s)
		case key == "body":
			v.bodyMode = value
		case key == "bin":
			v.binary = value
		case s == "redis=yes":
			v.redis = true
		case s == "usage=yes":
			v.usage = true
		case s == "record=yes":
			v.record = true
		case key == "replicas":
			n, err := strconv.Atoi(value)
			if err != nil || n < 1 {
				return v, fmt.Errorf("%q is not a number of replicas", s)
			}
			v.replicas = n
		case key == "inside":
			v.inside = value
		case key == "insured":
			v.insured = value == "yes"
		case key == "binding":
			v.binding = value
		default:
			v.env = append(v.env, s)
		}
	}
	return v, nil
}

// run is the program.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if len(o.mode.capacity) > 0 {
		return capacities(ctx, o, stdout, stderr)
	}
	l := &lab{log: stderr, tokenTime: o.tokenTime, rate: o.rate}
	defer l.stop()
	if err := l.start(ctx, o); err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%s, %s, %s, %s.\n", time.Now().UTC().Format("2006-01-02 15:04 UTC"), process.Machine(),
		runtime.Version(), process.EnvoyVersion(ctx, l.envoyPath)+l.peerVersions(ctx, o.peers))
	fmt.Fprintf(stdout, "Envoy workers: %d. Rounds: %d, interleaved. Prompts: %s.\n\n", o.workers, o.rounds,
		prompts(o.documents))
	if o.endpoints > 2 || o.events {
		fmt.Fprintf(stdout, "Endpoints: %d. KV events: %t.\n\n", o.endpoints, o.events)
	}
	if len(o.mode.fleet) > 0 {
		return l.fleet(ctx, o, stdout)
	}
	if o.beside.name != "" {
		fmt.Fprintf(stdout, "Beside: %s, %d a second. CPU contains theirs.\n\n", o.beside.title, besideRate)
	}
	if o.mode.first {
		return l.firstTokens(ctx, o, stdout)
	}
	r := newReport(l.stacks)
	var idle []float64 // by stack
	if o.idle > 0 {
		if idle, err = l.idle(ctx, o.idle, stdout); err != nil {
			return err
		}
	}
	for _, s := range o.shapes {
		for _, clients := range o.clients {
			results, err := l.measure(ctx, o, s, clients)
			if err != nil {
				return fmt.Errorf("%s, %d clients: %w", s.name, clients, err)
			}
			r.add(s, key{Shape: s.name, Clients: clients, Beside: o.beside.name, Rate: o.rate}, results)
			if o.endpoints > 2 {
				r.manyEngines(o.endpoints, results)
			}
		}
	}
	r.memory(l.stacks)
	if o.endpoints > 2 {
		r.fleetFigures(l.stacks, idle)
	}
	ledgers, err := ledger.Check(ctx, l.engines, o.profiles != "")
	if err != nil {
		return err
	}
	if o.events {
		if err := l.checkEvents(ctx, stdout); err != nil {
			return err
		}
	}
	r.write(stdout)
	fmt.Fprintf(stdout, "\n%s\n", ledgers)
	if o.last == "" {
		return nil
	}
	return publish(stdout, o.last, l.origin(ctx, o), r.figures)
}

func (l *lab) origin(ctx context.Context, o options) origin {
	return origin{time.Now().UTC().Format(time.DateOnly), process.Machine(),
		strings.TrimPrefix(l.peerVersions(ctx, o.peers), ", ")}
}

func prompts(documents int) string {
	switch documents {
	case 0:
		return "every one new from its first word on"
	case 1:
		return "the same but for their last words"
	}
	return fmt.Sprintf("%d, but for their last words", documents)
}
