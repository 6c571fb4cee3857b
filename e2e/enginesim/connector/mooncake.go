package connector

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"tandem/e2e/enginesim/engine"
)

// parseMooncake checks the members that Mooncake needs on both legs.
func (kv *Params) parseMooncake(own engine.Role) {
	switch {
	case kv.RemotePrefill && own == engine.RolePrefill:
		kv.Fatal = "AssertionError: a kv_producer got do_remote_prefill"
	case kv.RemoteDecode && own == engine.RoleDecode:
		kv.Fatal = "AssertionError: a kv_consumer got do_remote_decode"
	case kv.RemotePrefill && (kv.engineID == "" || kv.bootstrap == "" || kv.transfer == ""):
		kv.Parked = "remote_engine_id, remote_bootstrap_addr and transfer_id are needed"
	}
}

// findMooncake asks P's bootstrap server for its worker's address.
func findMooncake(ctx context.Context, kv *Params) (string, error) {
	if !strings.HasPrefix(kv.bootstrap, "http://") {
		return "", fmt.Errorf("%w: remote_bootstrap_addr %q has no scheme", engine.ErrLoadFailed, kv.bootstrap)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, kv.bootstrap+"/query", nil)
	if err != nil {
		return "", fmt.Errorf("%w: %w", engine.ErrLoadFailed, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", fmt.Errorf("%w: %w", engine.ErrLoadFailed, err)
	}
	defer resp.Body.Close()
	var engines map[string]bootstrapEngine
	if err := json.NewDecoder(resp.Body).Decode(&engines); err != nil {
		return "", fmt.Errorf("%w: %w", engine.ErrLoadFailed, err)
	}
	for _, e := range engines {
		if e.EngineID == kv.engineID {
			u, err := url.Parse(e.Workers["0"]["0"])
			if err != nil {
				return "", fmt.Errorf("%w: %w", engine.ErrLoadFailed, err)
			}
			return u.Host, nil
		}
	}
	return "", fmt.Errorf("%w: the bootstrap server knows no engine %s", engine.ErrLoadFailed, kv.engineID)
}

type bootstrapEngine struct {
	EngineID string                       `json:"engine_id"`
	Workers  map[string]map[string]string `json:"worker_addr"`
}

// mooncakeBootstrap returns P's HTTP server (mooncake_utils.py).
func (s *Node) mooncakeBootstrap() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /query", func(w http.ResponseWriter, _ *http.Request) {
		engines := map[string]bootstrapEngine{}
		for rank, n := range s.ranks() {
			worker := "tcp://" + net.JoinHostPort(n.SideHost, strconv.Itoa(n.SidePort))
			engines[strconv.Itoa(rank)] = bootstrapEngine{n.EngineID, map[string]map[string]string{"0": {"0": worker}}}
		}
		answerJSON(w, engines)
	})
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	return mux
}
