package main

import (
	"errors"
	"os"
	"strings"

	"tandem/extproc/kvtransfer"
	"tandem/internal/certificates"
	"tandem/internal/config"
	"tandem/internal/orders"
	configv1 "tandem/protos/config/v1"
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
	if t := cfg.GetExtProc().GetTls(); t.GetMode() == "files" && t.GetCertFile() != "" && t.GetKeyFile() != "" {
		_, err := certificates.TLS(t)
		add("extProc.tls", err)
	}
	r := cfg.GetState().GetRedis()
	if file := r.GetPasswordFile(); file != "" {
		text, err := os.ReadFile(file)
		if err == nil && len(text) == 0 {
			err = errors.New(file + " is empty")
		}
		add("state.redis.passwordFile", err)
	}
	if t := r.GetTls(); t != nil && (t.GetCertFile() == "") == (t.GetKeyFile() == "") {
		_, err := redisTLS(t)
		add("state.redis.tls", err)
	}
	return m
}
