package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate/enginehttp"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
	"tandem/replica/orders"
)

// checkFiles reads the files that a configuration names for the server itself, as the server would.
func checkFiles(cfg *configv1.Config) (m config.ValidationErrors) {
	add := func(path string, err error) {
		if err != nil {
			m = append(m, config.ValidationError{Path: path, Hint: strings.TrimPrefix(err.Error(), path+": ")})
		}
	}
	if file := cfg.GetTickets().GetKeyFile(); file != "" {
		_, _, err := kvtransfer.ReadKeyFile(file)
		add("tickets.keyFile", err)
	}
	if file := cfg.GetAdmin().GetTokenFile(); file != "" {
		_, err := orders.ReadToken(file)
		add("admin.tokenFile", err)
	}
	if file := cfg.GetUsage().GetLedger(); file != "" {
		_, err := os.Stat(filepath.Dir(file))
		add("usage.ledger", err)
	}
	for i, p := range cfg.GetPools() {
		checkKey(add, fmt.Sprintf("pools[%d].apiKeyFile", i), p.GetApiKeyFile())
		for j, e := range p.GetEndpoints() {
			checkKey(add, fmt.Sprintf("pools[%d].endpoints[%d].apiKeyFile", i, j), e.GetApiKeyFile())
		}
	}
	if t := cfg.GetExtProc().GetTls(); t.GetMode() == "files" {
		checkPair(add, "extProc.tls", t)
		add("extProc.tls.clientCaFile", checkAuthorities(t.GetClientCaFile()))
	}
	r := cfg.GetState().GetRedis()
	if file := r.GetPasswordFile(); file != "" {
		text, err := os.ReadFile(file)
		if err == nil && len(text) == 0 {
			err = errors.New(file + " is empty")
		}
		add("state.redis.passwordFile", err)
	}
	checkPair(add, "state.redis.tls", r.GetTls())
	add("state.redis.tls.caFile", checkAuthorities(r.GetTls().GetCaFile()))
	return m
}

// checkKey checks a file with an engine's API key; "" is none.
func checkKey(add func(path string, err error), path, file string) {
	if file != "" {
		_, err := enginehttp.ReadKey(file)
		add(path, err)
	}
}

// pairFiles names the files of a certificate and its key.
type pairFiles interface {
	GetCertFile() string
	GetKeyFile() string
}

// checkPair checks that a certificate and its key can be read, each by itself so that all that is missing is named, and
// then that they belong together.
func checkPair(add func(path string, err error), path string, t pairFiles) {
	certificate, certErr := readIfNamed(t.GetCertFile())
	add(path+".certFile", certErr)
	key, keyErr := readIfNamed(t.GetKeyFile())
	add(path+".keyFile", keyErr)
	if certificate != nil && key != nil {
		if _, err := tls.X509KeyPair(certificate, key); err != nil {
			add(path+".certFile", fmt.Errorf("does not go with keyFile: %w", err))
		}
	}
}

// checkAuthorities checks a file of certificates of authorities; "" is none.
func checkAuthorities(file string) error {
	pem, err := readIfNamed(file)
	if err == nil && file != "" && !x509.NewCertPool().AppendCertsFromPEM(pem) {
		err = errors.New("no certificate in " + file)
	}
	return err
}

// readIfNamed reads a file. It returns nil for "": other checks find a missing name.
func readIfNamed(file string) ([]byte, error) {
	if file == "" {
		return nil, nil
	}
	return os.ReadFile(file)
}
