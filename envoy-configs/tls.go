package envoyconfigs

import (
	"path"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"

	configv1 "tandem/protos/config/v1"
)

// Names of secrets begin with the connection that they are for.
const (
	extProcTLS  = "extproc"
	endpointTLS = "endpoint"
)

// clientTLS is how Envoy speaks TLS to a cluster.
type clientTLS struct {
	CAFile, ServerName, CertFile, KeyFile string
	H2                                    bool // gRPC: the protocol has to be agreed on
}

func newClientTLS(t *configv1.ClientTls, h2 bool) *clientTLS {
	return &clientTLS{t.GetCaFile(), t.GetServerName(), t.GetCertFile(), t.GetKeyFile(), h2}
}

// tls speaks TLS as configured; nil is plaintext. Over xDS, certificates are secrets of that name; "": they are not.
func (m clusters) tls(t *clientTLS, name string) *corev3.TransportSocket {
	if t == nil {
		return nil
	}
	common := &tlsv3.CommonTlsContext{TlsParams: &tlsv3.TlsParameters{TlsMinimumProtocolVersion: tlsv3.TlsParameters_TLSv1_2}}
	if t.H2 {
		common.AlpnProtocols = []string{"h2"}
	}
	if m.Dynamic && name != "" {
		t.refer(common, name)
	} else {
		t.include(common)
	}
	return m.socket("envoy.transport_sockets.tls", m.pack(&tlsv3.UpstreamTlsContext{Sni: t.ServerName,
		CommonTlsContext: common}))
}

// include names the files in the context itself.
func (t *clientTLS) include(common *tlsv3.CommonTlsContext) {
	if c := t.certificate(); c != nil {
		common.TlsCertificates = []*tlsv3.TlsCertificate{c}
	}
	if v := t.validation(); v != nil {
		common.ValidationContextType = &tlsv3.CommonTlsContext_ValidationContext{ValidationContext: v}
	}
}

// refer has the context get its files from secrets.
func (t *clientTLS) refer(common *tlsv3.CommonTlsContext, name string) {
	for _, secret := range t.secrets(name) {
		config := &tlsv3.SdsSecretConfig{Name: secret.GetName(), SdsConfig: ads()}
		if secret.GetTlsCertificate() != nil {
			common.TlsCertificateSdsSecretConfigs = []*tlsv3.SdsSecretConfig{config}
		} else {
			common.ValidationContextType = &tlsv3.CommonTlsContext_ValidationContextSdsSecretConfig{
				ValidationContextSdsSecretConfig: config,
			}
		}
	}
}

// secrets name the files, which Envoy reads again when their folders change. Their contents stay on Envoy's machine.
func (t *clientTLS) secrets(name string) (out []*tlsv3.Secret) {
	if t == nil {
		return nil
	}
	if c := t.certificate(); c != nil {
		c.WatchedDirectory = folder(t.CertFile)
		out = append(out, &tlsv3.Secret{
			Name: name + "-certificate", Type: &tlsv3.Secret_TlsCertificate{TlsCertificate: c},
		})
	}
	if v := t.validation(); v != nil {
		v.WatchedDirectory = folder(t.CAFile)
		out = append(out, &tlsv3.Secret{
			Name: name + "-authorities", Type: &tlsv3.Secret_ValidationContext{ValidationContext: v},
		})
	}
	return out
}

// certificate is Envoy's own; nil: none.
func (t *clientTLS) certificate() *tlsv3.TlsCertificate {
	if t.CertFile == "" {
		return nil
	}
	return &tlsv3.TlsCertificate{CertificateChain: file(t.CertFile), PrivateKey: file(t.KeyFile)}
}

// validation is how the other side's certificate is checked; nil: not at all.
func (t *clientTLS) validation() *tlsv3.CertificateValidationContext {
	if t.CAFile == "" {
		return nil
	}
	v := &tlsv3.CertificateValidationContext{TrustedCa: file(t.CAFile)}
	if t.ServerName != "" {
		v.MatchTypedSubjectAltNames = []*tlsv3.SubjectAltNameMatcher{{
			SanType: tlsv3.SubjectAltNameMatcher_DNS,
			Matcher: &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: t.ServerName}},
		}}
	}
	return v
}

func file(name string) *corev3.DataSource {
	return &corev3.DataSource{Specifier: &corev3.DataSource_Filename{Filename: name}}
}

func folder(file string) *corev3.WatchedDirectory {
	return &corev3.WatchedDirectory{Path: path.Dir(file)}
}
