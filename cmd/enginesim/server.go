package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// exitEngineDied is the status of a simulator whose request would have killed a real engine.
const exitEngineDied = 70

// sim is one simulated engine.
type sim struct {
	cfg      *config
	log      io.Writer
	logMu    sync.Mutex
	engineID string
	sideHost string
	sidePort int
	started  time.Time
	random   lockedRand

	pool        *pool
	events      *kvEvents // nil: none
	ledger      *ledger
	rooms       *rendezvous
	store       *store
	encodings   *encodings
	buffer      *buffer // nil but on decode engines with the connector lmcache
	receivers   []net.Listener
	notifier    notifier
	inbox       *inbox
	stopped     chan struct{} // closed by close
	peers       *peers
	metrics     *metrics
	records     *recorder
	fail        *failures
	responses   *responseStore
	prefillTurn chan struct{}
	bodies      sync.Pool // *[]byte

	mux  *http.ServeMux
	side net.Listener

	bootstrap     *http.Server // of a prefill engine whose dialect has one
	bootstrapAddr string

	mu       sync.Mutex
	web      *http.Server
	webAddr  string
	refusing sync.Mutex
	sideConn map[net.Conn]struct{}
	closed   bool

	dying atomic.Bool
	died  chan struct{} // closed when the engine has died
}

// lockedRand is for ids, not for answers.
type lockedRand struct {
	mu sync.Mutex
	r  *rand.Rand
}

func newLockedRand() lockedRand {
	return lockedRand{r: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
}

func (l *lockedRand) Uint32() uint32 { return uint32(l.Uint64()) }
func (l *lockedRand) Uint64() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.r.Uint64()
}

func (l *lockedRand) hex16() string { return fmt.Sprintf("%016x", l.Uint64()) }

func (l *lockedRand) uuid() string {
	a, b := l.Uint64(), l.Uint64()
	a = a&^0xF000 | 0x4000
	b = b&^(3<<62) | 2<<62
	return fmt.Sprintf("%08x-%04x-%04x-%04x-%012x", a>>32, a>>16&0xFFFF, a&0xFFFF, b>>48, b&(1<<48-1))
}

// start makes an engine and opens its ports.
func start(cfg *config, log io.Writer) (*sim, error) {
	s := &sim{
		cfg: cfg, log: log, engineID: cfg.engineID, started: time.Now(), random: newLockedRand(),
		pool: newPool(cfg.blocks, cfg.blockSize), peers: newPeers(), metrics: newMetrics(cfg.models[0]),
		records: newRecorder(cfg.record, cfg.recordCount, cfg.recordBody), fail: newFailures(nil), responses: newResponseStore(),
		prefillTurn: make(chan struct{}, 1), sideConn: make(map[net.Conn]struct{}), died: make(chan struct{}),
	}
	if s.engineID == "" {
		s.engineID = s.random.uuid()
	}
	s.ledger, s.rooms, s.inbox, s.stopped = newLedger(s.pool, cfg.lease), newRendezvous(), newInbox(), make(chan struct{})
	s.store, s.encodings = newStore(s, cfg.store), newEncodings(cfg.lease)
	s.mux = s.routes()
	var err error
	if s.side, err = net.Listen("tcp", cfg.sideChannel); err != nil {
		return nil, fmt.Errorf("opening the side channel: %w", err)
	}
	s.sideHost, s.sidePort = cfg.advertiseHost, s.side.Addr().(*net.TCPAddr).Port
	if (s.roomed() || cfg.connector == connectorMooncake) && cfg.role == rolePrefill {
		if err := s.openBootstrap(); err != nil {
			_ = s.side.Close()
			return nil, err
		}
	}
	go s.acceptSide()
	if cfg.connector == connectorLMCache && cfg.role != rolePrefill {
		if err := s.listenLMCache(); err != nil {
			s.closeSide()
			return nil, err
		}
	}
	if s.events, err = startKVEvents(cfg); err != nil {
		s.closeSide()
		return nil, err
	}
	s.pool.events = s.events
	s.webAddr = cfg.listen
	if err := s.openWeb(); err != nil {
		s.closeSide()
		s.events.close()
		return nil, err
	}
	if cfg.proxy != "" {
		go s.register()
	}
	s.addFailures(cfg.fail)
	return s, nil
}

// openWeb opens the HTTP port: HTTP/1.1 and h2c. After the first time it is the same port again.
func (s *sim) openWeb() error {
	l, err := net.Listen("tcp", s.webAddr)
	if err != nil {
		return fmt.Errorf("opening the HTTP port: %w", err)
	}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	web := &http.Server{
		Handler: s, Protocols: &protocols, IdleTimeout: s.cfg.keepAlive, ReadHeaderTimeout: time.Minute,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 4096, MaxReceiveBufferPerConnection: 16 << 20, MaxReceiveBufferPerStream: 4 << 20},
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = l.Close()
		return net.ErrClosed
	}
	s.web, s.webAddr = web, l.Addr().String()
	go func() { _ = web.Serve(l) }()
	return nil
}

func (s *sim) addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.webAddr
}

// refuse closes the HTTP port for a while. Running answers go on, idle connections are closed.
func (s *sim) refuse(d time.Duration) {
	s.refusing.Lock() // one after another
	defer s.refusing.Unlock()
	time.Sleep(20 * time.Millisecond) // lets the answer to the POST that asked for this out
	s.mu.Lock()
	web := s.web
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	_ = web.Shutdown(ctx)
	<-ctx.Done()
	for range 50 {
		if err := s.openWeb(); err == nil || errors.Is(err, net.ErrClosed) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	s.logf("the HTTP port could not be opened again")
}

func (s *sim) acceptSide() {
	for {
		conn, err := s.side.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = conn.Close()
			continue
		}
		s.sideConn[conn] = struct{}{}
		s.mu.Unlock()
		go func() {
			s.serveSide(conn)
			s.mu.Lock()
			delete(s.sideConn, conn)
			s.mu.Unlock()
		}()
	}
}

// die ends the simulator as a raising scheduler ends vLLM's engine: ports closed, connections cut, status 70.
func (s *sim) die(reason string) {
	if !s.dying.CompareAndSwap(false, true) {
		return
	}
	s.logf("the engine dies: %s", reason)
	go func() {
		time.Sleep(30 * time.Millisecond) // lets a last 500 out, as vLLM's API server does
		s.close()
		close(s.died)
	}()
}

// close cuts everything at once.
func (s *sim) close() {
	s.mu.Lock()
	if !s.closed {
		close(s.stopped)
	}
	s.closed = true
	web := s.web
	conns := make([]net.Conn, 0, len(s.sideConn))
	for c := range s.sideConn {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	_ = web.Close()
	s.closeSide()
	s.events.close()
	if s.bootstrap != nil {
		_ = s.bootstrap.Close()
	}
	for _, c := range conns {
		_ = c.Close()
	}
	s.peers.close()
	s.ledger.releaseAll()
}

// closeSide closes the ports that other engines connect to, and the one to the router.
func (s *sim) closeSide() {
	_ = s.side.Close()
	for _, l := range s.receivers {
		_ = l.Close()
	}
	if s.buffer != nil {
		s.buffer.reset()
	}
	s.notifier.mu.Lock()
	defer s.notifier.mu.Unlock()
	if s.notifier.socket != nil {
		_ = s.notifier.socket.Close()
		s.notifier.socket = nil
	}
}

// shutdown lets running answers end until ctx is over, then cuts.
func (s *sim) shutdown(ctx context.Context) {
	s.mu.Lock()
	web := s.web
	s.mu.Unlock()
	_ = web.Shutdown(ctx)
	s.close()
}

// ServeHTTP adds what every answer of vLLM's API server has.
func (s *sim) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Server", "uvicorn")
	if id := r.Header.Get("X-Request-Id"); id != "" { // --enable-request-id-headers
		h.Set("X-Request-Id", id)
	} else {
		h.Set("X-Request-Id", s.random.hex16()+s.random.hex16())
	}
	s.mux.ServeHTTP(w, r)
}

func (s *sim) routes() *http.ServeMux {
	mux := http.NewServeMux()
	for path, a := range map[string]api{
		"/v1/chat/completions": apiChat, "/v1/completions": apiCompletions, "/v1/responses": apiResponses,
		"/v1/messages": apiMessages, "/inference/v1/generate": apiGenerate,
	} {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) { s.serveCall(w, r, a) })
	}
	if s.cfg.connector == connectorSGLang {
		mux.HandleFunc("POST /generate", func(w http.ResponseWriter, r *http.Request) { s.serveCall(w, r, apiSGLang) })
		mux.HandleFunc("GET /server_info", func(w http.ResponseWriter, _ *http.Request) { s.serveInfo(w) })
		mux.HandleFunc("GET /v1/loads", s.recorded(s.serveLoads))
	}
	if s.cfg.connector == connectorTRTLLM {
		mux.HandleFunc("GET /server_info", func(w http.ResponseWriter, _ *http.Request) { s.serveContextInfo(w) })
	}
	mux.HandleFunc("GET /v1/responses/{id}", s.recorded(s.serveStored))
	mux.HandleFunc("POST /v1/embeddings", s.recorded(s.serveEmbeddings))
	mux.HandleFunc("POST /v1/audio/transcriptions", s.recorded(s.serveAudio))
	mux.HandleFunc("POST /tokenize", s.recorded(s.serveTokenize))
	mux.HandleFunc("POST /v1/chat/completions/render", s.recorded(s.serveRender))
	mux.HandleFunc("POST /detokenize", s.recorded(s.serveDetokenize))
	mux.HandleFunc("POST /reset_prefix_cache", s.recorded(func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		writeRaw(w, http.StatusOK, fmt.Appendf(nil, `{"success":%t}`, s.pool.resetPrefixCache()))
	}))
	mux.HandleFunc("GET /v1/models", s.serveModels)
	mux.HandleFunc("GET /health", s.serveHealth)
	mux.HandleFunc("/ping", s.serveHealth)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { writeRaw(w, 200, []byte(`{"version":"0.32.0"}`)) })
	mux.Handle("GET /metrics", s.metricsHandler())
	mux.HandleFunc("GET /sim/requests", s.serveRequests)
	mux.HandleFunc("GET /sim/state", s.serveState)
	mux.HandleFunc("POST /sim/reset", s.serveReset)
	mux.HandleFunc("/sim/fail", s.serveFail)
	mux.HandleFunc("POST /sim/kv-events", s.serveLose)
	mux.HandleFunc("POST /sim/encodings/{hash}", s.serveEncoding)
	mux.HandleFunc("/", s.recorded(s.serveUnknown))
	return mux
}

// writeRaw answers with JSON that is already written.
func writeRaw(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// body reads a request's body into pooled memory; put gives that back.
func (s *sim) body(w http.ResponseWriter, r *http.Request) (body []byte, put func(), err error) {
	buf, _ := s.bodies.Get().(*[]byte)
	if buf == nil {
		buf = new([]byte)
	}
	put = func() {
		if cap(*buf) <= 1<<20 {
			s.bodies.Put(buf)
		}
	}
	*buf = (*buf)[:0]
	if n := r.ContentLength; n > int64(cap(*buf)) && n <= s.cfg.maxBody {
		*buf = make([]byte, 0, n+1)
	} else if cap(*buf) == 0 {
		*buf = make([]byte, 0, 4096)
	}
	in := http.MaxBytesReader(w, r.Body, s.cfg.maxBody)
	for {
		n, err := in.Read((*buf)[len(*buf):cap(*buf)])
		*buf = (*buf)[:len(*buf)+n]
		if err == io.EOF {
			return *buf, put, nil
		}
		if err != nil {
			return nil, put, err
		}
		if len(*buf) == cap(*buf) {
			*buf = append(*buf, 0)[:len(*buf)]
		}
	}
}
