package main

import (
	"flag"
	"fmt"
	"io"

	envoyconfigs "tandem/envoy-configs"
	configv1 "tandem/protos/config/v1"
)

// envoy prints the Envoy bootstrap of a configuration, and nothing else, to stdout.
func envoy(args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("tandem envoy", flag.ContinueOnError)
	flags.SetOutput(stderr)
	file := flags.String("f", "", "configuration `file` (YAML)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	config, _, err := configv1.Load(*file)
	if err != nil {
		return err
	}
	bootstrap, err := envoyconfigs.Bootstrap(config)
	if err != nil {
		return err
	}
	if _, err := stdout.Write(bootstrap); err != nil {
		return fmt.Errorf("writing the bootstrap: %w", err)
	}
	return nil
}
