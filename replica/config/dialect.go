package config

import (
	"cmp"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/engineclock"
	configv1 "tandem/protos/config/v1"
)

// Dialects returns the possible values of kvTransfer.
func Dialects() []string { return append(kvtransfer.Names(), "none") }

// DialectOf returns the dialect of the pool's engines: the zero value for none, and for an unknown name.
func DialectOf(p *configv1.Pool) kvtransfer.Dialect {
	d, _ := kvtransfer.New(DialectOptions(p)) // validation reports invalid options at their place in the configuration
	return d
}

// DialectOptions returns the settings of the pool's dialect.
func DialectOptions(p *configv1.Pool) kvtransfer.Options {
	o := kvtransfer.Options{
		Name: p.GetKvTransfer(), Members: p.GetMembers(), ReuseTokenIDs: p.GetNixl().GetReuseTokenIds(),
		Lease: cmp.Or(Duration(p.GetNixl().GetLease()), Duration(p.GetKvTimeout())),
		Key:   p.GetOrchestrated().GetKey(), Params: p.GetOrchestrated().GetHandOver() == "params",
		NoticeTimeout: Duration(p.GetLmcache().GetNoticeTimeout()), RetFirstToken: p.GetLmcache().GetRetFirstToken(),
		ChunkTokens: p.GetLmcache().GetChunkSize(),
	}
	if p.GetNixl().GetDeclineExpired() {
		o.Clocks = engineclock.New()
	}
	for _, e := range p.GetEndpoints() {
		if t := e.GetTransfer(); e.GetRole() != "prefill" {
			o.DecodeTP, o.DecodeDP = max(o.DecodeTP, int(t.GetTensorParallelSize())),
				max(o.DecodeDP, int(t.GetDataParallelSize()))
		}
	}
	return o
}

// TransferOf returns an endpoint's settings of KV transfer.
func TransferOf(e *configv1.Endpoint) kvstate.Transfer {
	port := func(n int32) uint16 { return uint16(n) }
	t, r := e.GetTransfer(), e.GetLmcache()
	return kvstate.Transfer{
		Host: t.GetHost(), Release: e.GetRelease(), TP: int(t.GetTensorParallelSize()),
		DP:            int(t.GetDataParallelSize()),
		BootstrapPort: port(t.GetBootstrapPort()),
		HandshakePort: port(t.GetHandshakePort()), NotifyPort: port(t.GetNotifyPort()), P2PPort: int(t.GetP2PPort()),
		LMCacheInitPort: int(r.GetInitPort()), LMCacheAllocPort: int(r.GetAllocPort()),
		LMCacheQueryPort: int(r.GetQueryPort()),
		BufferTokens:     r.GetBufferTokens(),
	}
}

// PortOf returns the port of a setting below the endpoint's ([kvtransfer.Port]), 0 if it is not set.
func PortOf(e *configv1.Endpoint, setting string) int32 {
	t, r := e.GetTransfer(), e.GetLmcache()
	switch setting {
	case "transfer.bootstrapPort":
		return t.GetBootstrapPort()
	case "transfer.handshakePort":
		return t.GetHandshakePort()
	case "transfer.notifyPort":
		return t.GetNotifyPort()
	case "transfer.p2pPort":
		return t.GetP2PPort()
	case "lmcache.initPort":
		return r.GetInitPort()
	case "lmcache.allocPort":
		return r.GetAllocPort()
	case "lmcache.queryPort":
		return r.GetQueryPort()
	}
	return 0
}
