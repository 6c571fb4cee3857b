package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"

	configv1 "tandem/protos/config/v1"
)

// RedisTLS returns the TLS of rediss://, nil without settings for it.
func RedisTLS(t *configv1.RedisTls) (*tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.GetServerName()}
	if file := t.GetCaFile(); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("state.redis.tls: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, errors.New("state.redis.tls.caFile: no certificate in it")
		}
	}
	if t.GetCertFile() != "" {
		// for every new connection: files change
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(t.GetCertFile(), t.GetKeyFile())
			return &pair, err
		}
		if _, err := c.GetClientCertificate(nil); err != nil {
			return nil, fmt.Errorf("state.redis.tls: %w", err)
		}
	}
	return c, nil
}
