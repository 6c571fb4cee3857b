package envoyconfigs

import (
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/types/known/wrapperspb"

	configv1 "tandem/protos/config/v1"
)

// BehindName is the name of the listener, without a port, that stands behind another one, and of the cluster that
// leads to it.
const BehindName = "tandem"

// Behind is what an Envoy needs whose listeners are not ours, such as a gateway's (docs/adr/0039): the main listener
// of [Bootstrap] without a port, the legs' listeners, and the clusters. A route of the other listener leads to the
// cluster [BehindName], and everything of Tandem's happens behind it: so the other listener evaluates credentials and
// rate limits once, and its other routes notice nothing.
//
// It has every scheme and every leg, like [Resources], so that a change of pools changes nothing here.
type Behind struct {
	Clusters  []*clusterv3.Cluster
	Listeners []*listenerv3.Listener
	// Replies are answers of the other listener, in OpenAI's shape, to requests that would go to the cluster.
	Replies []*hcmv3.ResponseMapper
	// Usage reads the tokens of answers on the other listener: dynamic metadata stays with the listener that reads it.
	Usage *hcmv3.HttpFilter
	// IdleTimeout is the longest pause within an answer.
	IdleTimeout time.Duration
}

// NewBehind makes the resources for a configuration that was loaded by configv1.
func NewBehind(c *configv1.Config) (*Behind, error) {
	b, m, err := behind(c)
	if err != nil {
		return nil, err
	}
	return b, m.err
}

func behind(c *configv1.Config) (*Behind, model, error) {
	m, err := newModel(c, false)
	if err != nil {
		return nil, m, err
	}
	m.serveAll()
	m.Late = true
	return behindOf(m), m, nil
}

func behindOf(m model) *Behind {
	return &Behind{
		Clusters:    append(clusters(m).all(), clusters(m).loopCluster(loop{BehindName, BehindName})),
		Listeners:   append([]*listenerv3.Listener{behindListener(m)}, legs(m).all()...),
		Replies:     repliesInFront(m),
		Usage:       filters(m).usage(),
		IdleTimeout: m.IdleTimeout,
	}
}

// behindListener is the main listener, reached through its cluster alone.
func behindListener(m model) *listenerv3.Listener {
	manager := listeners(m).mainManager()
	manager.UseRemoteAddress = nil // the listener in front has set x-forwarded-for and x-request-id
	manager.GetRouteConfig().ValidateClusters = wrapperspb.Bool(false)
	l := listeners(m).listener(BehindName, manager)
	l.ListenerSpecifier = internalListener()
	return l
}

// tooManyTokens is the answer of the global rate limit, which has no text of its own. In Envoy Gateway only its header
// x-ratelimit-reset has the time until the next period.
func tooManyTokens() localReply {
	return localReply{"response.code == 429 && " + details("request_rate_limited"), 0, "requests", "rate_limit_exceeded",
		"the rate limit of this gateway is exceeded", "%RESP(x-ratelimit-reset)%"}
}

// refusals are answers to requests that never reach Tandem, because a filter in front of it refuses them. The reason
// is the filter's own.
func refusals() []localReply {
	const why = "%LOCAL_REPLY_BODY%"
	return []localReply{
		{"response.code == 401", 0, clientsFault, "invalid_api_key", why, ""},
		{"response.code == 403", 0, clientsFault, "permission_denied", why, ""},
		tooManyTokens(),
		{"response.code == 429", 0, "requests", "rate_limit_exceeded", why, ""},
	}
}

// repliesInFront change answers to requests for the cluster, and no other.
func repliesInFront(m model) (out []*hcmv3.ResponseMapper) {
	for _, reply := range append(refusals(), envoysReplies()...) {
		// An external authorization service writes its answers itself.
		reply.When = "xds.cluster_name == '" + BehindName + "' && !" + details("ext_authz") + " && (" + reply.When + ")"
		out = append(out, replies(m).mappers(reply)...)
	}
	return out
}
