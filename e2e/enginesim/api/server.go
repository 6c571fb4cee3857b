package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/fault"
	"tandem/e2e/enginesim/request"
	"tandem/e2e/enginesim/web"
)

// Server is one simulated engine: HTTP in front of a node.
type Server struct {
	*connector.Node // data-parallel rank 0

	ranks     ranks
	next      atomic.Uint64 // rank of a request that names none
	cfg       *Config
	web       *web.Port
	mux       *http.ServeMux
	encodings *encodings
	Records   *recorder
	responses *responseStore
	adapters  adapters
	bodies    sync.Pool // *[]byte
	compile   sync.Once // for log probabilities

	dying atomic.Bool
	Died  chan struct{}              // closed when the engine has died
	again atomic.Pointer[fault.Rule] // of a new engine in its place
}

// Next returns the configuration of the engine that starts in the place of this one, which has died, and after what
// time: with the same ports and flags, and without failures. Nil: it has died for good.
func (s *Server) Next() (*Config, time.Duration) {
	again := s.again.Load()
	if again == nil {
		return nil, 0
	}
	cfg := *s.cfg
	cfg.Listen, cfg.SideChannel, cfg.Fail, cfg.Warmup = s.Addr(), s.Side.Addr().String(), nil, again.Warm
	if s.BootstrapAddr != "" {
		cfg.Bootstrap = s.BootstrapAddr
	}
	return &cfg, again.Wait
}

// Start makes an engine and opens its ports.
func Start(cfg *Config, log io.Writer) (*Server, error) {
	ranks, err := connector.NewRanks(&cfg.Config, fault.New(nil), log)
	if err != nil {
		return nil, err
	}
	s := &Server{
		Node: ranks[0], ranks: ranks, cfg: cfg, encodings: newEncodings(cfg.Lease),
		Records:   newRecorder(cfg.Record, cfg.RecordCount, cfg.RecordBody),
		responses: newResponseStore(), Died: make(chan struct{}),
	}
	s.mux = s.routes()
	s.web = web.New(cfg.Listen, cfg.Front.Wrap(s), cfg.KeepAlive, cfg.Front.Listener)
	if err := s.web.Open(); err != nil {
		s.closeRanks()
		return nil, err
	}
	s.Faults.Add(cfg.Fail)
	s.strike(cfg.Fail)
	return s, nil
}

// Addr returns the HTTP address, host:port.
func (s *Server) Addr() string { return s.web.Addr() }

// die ends the simulator as a raising scheduler ends vLLM's engine: ports closed, connections cut, status 70.
func (s *Server) die(reason string) {
	if !s.dying.CompareAndSwap(false, true) {
		return
	}
	s.Logf("the engine dies: %s", reason)
	go func() {
		time.Sleep(30 * time.Millisecond) // lets a last 500 out, as vLLM's API server does
		s.Close()
		close(s.Died)
	}()
}

// Close cuts everything at once.
func (s *Server) Close() {
	s.web.Close()
	s.closeRanks()
}

func (s *Server) closeRanks() {
	for _, n := range s.ranks {
		n.Close()
	}
}

// Shutdown lets running answers end until ctx ends, then cuts them.
func (s *Server) Shutdown(ctx context.Context) {
	s.web.Shutdown(ctx)
	s.Close()
}

// ServeHTTP adds the headers that every answer of vLLM's API server has.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Server", "uvicorn")
	if id := r.Header.Get("X-Request-Id"); id != "" { // --enable-request-id-headers
		h.Set("X-Request-Id", id)
	} else {
		h.Set("X-Request-Id", engine.Hex16()+engine.Hex16())
	}
	if time.Since(s.Started) < s.cfg.Warmup && !strings.HasPrefix(r.URL.Path, "/sim/") {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	s.mux.ServeHTTP(w, r)
}

func (s *Server) routes() *http.ServeMux {
	mux := http.NewServeMux()
	for path, a := range map[string]request.API{
		"/v1/chat/completions": request.Chat, "/v1/completions": request.Completions,
		"/v1/responses": request.Responses,
		"/v1/messages":  request.Messages, "/inference/v1/generate": request.Generate,
	} {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) { s.serveCall(w, r, a) })
	}
	switch s.cfg.Connector {
	case connector.SGLang:
		mux.HandleFunc("POST /generate", func(w http.ResponseWriter, r *http.Request) {
			s.serveCall(w, r, request.SGLang)
		})
		mux.HandleFunc("GET /server_info", func(w http.ResponseWriter, _ *http.Request) { s.serveInfo(w) })
	case connector.TRTLLM:
		mux.HandleFunc("GET /server_info", func(w http.ResponseWriter, _ *http.Request) { s.serveContextInfo(w) })
	default: // vLLM has one in development mode only
		mux.HandleFunc("GET /server_info", s.serveConfig)
	}
	mux.HandleFunc("GET /v1/responses/{id}", s.recorded(s.serveStored))
	mux.HandleFunc("POST /v1/embeddings", s.recorded(s.serveEmbeddings))
	mux.HandleFunc("POST /v1/audio/transcriptions", s.recorded(s.serveAudio))
	mux.HandleFunc("POST /tokenize", s.recorded(s.serveTokenize))
	for path, a := range map[string]request.API{
		"/v1/chat/completions": request.Chat, "/v1/messages": request.Messages, "/v1/responses": request.Responses,
	} {
		mux.HandleFunc("POST "+path+"/render", s.recorded(func(w http.ResponseWriter, _ *http.Request, body []byte) {
			s.serveRender(w, body, a)
		}))
	}
	mux.HandleFunc("POST /detokenize", s.recorded(s.serveDetokenize))
	mux.HandleFunc("POST /reset_prefix_cache", s.recorded(func(w http.ResponseWriter, _ *http.Request, _ []byte) {
		writeRaw(w, http.StatusOK, fmt.Appendf(nil, `{"success":%t}`, s.Pool.ResetPrefixCache()))
	}))
	mux.HandleFunc("GET /v1/models", s.serveModels)
	for path, load := range map[string]bool{"/v1/load_lora_adapter": true, "/v1/unload_lora_adapter": false} {
		mux.HandleFunc("POST "+path, s.recorded(func(w http.ResponseWriter, _ *http.Request, body []byte) {
			s.changeAdapters(w, body, load)
		}))
	}
	mux.HandleFunc("GET /health", s.serveHealth)
	mux.HandleFunc("/ping", s.serveHealth)
	mux.HandleFunc("GET /version",
		func(w http.ResponseWriter, _ *http.Request) { writeRaw(w, 200, []byte(`{"version":"0.32.0"}`)) })
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

// body reads a request's body into pooled memory; put returns that to the pool.
func (s *Server) body(w http.ResponseWriter, r *http.Request) (body []byte, put func(), err error) {
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
	if n := r.ContentLength; n > int64(cap(*buf)) && n <= s.cfg.MaxBody {
		*buf = make([]byte, 0, n+1)
	} else if cap(*buf) == 0 {
		*buf = make([]byte, 0, 4096)
	}
	in := http.MaxBytesReader(w, r.Body, s.cfg.MaxBody)
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
