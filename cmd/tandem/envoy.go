package main

import (
	"flag"
	"fmt"
	"io"

	envoyconfigs "tandem/envoy-configs"
	configv1 "tandem/protos/config/v1"
)

// envoy prints the Envoy configuration that belongs to a Tandem configuration, and nothing else, to stdout: a complete
// bootstrap, or the resources with which a gateway makes one.
func envoy(args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("tandem envoy", flag.ContinueOnError)
	flags.SetOutput(stderr)
	file := flags.String("f", "", "configuration `file` (YAML)")
	whose := flags.String("for", "envoy", "`whom` to configure: envoy (a bootstrap), or envoy-gateway (Kubernetes resources)")
	var o envoyconfigs.GatewayOptions
	flags.StringVar(&o.Namespace, "namespace", "default", "of the resources for Envoy Gateway")
	flags.StringVar(&o.Name, "name", "tandem", "of the resources for Envoy Gateway")
	flags.StringVar(&o.Class, "class", "eg", "GatewayClass of the resources for Envoy Gateway")
	flags.BoolVar(&o.Standalone, "standalone", false, "Envoy Gateway runs without a cluster and starts Envoy itself")
	upstream := flags.String("upstream", string(envoyconfigs.OriginalDst), "how Envoy Gateway's Envoy gets to endpoints: original-dst (any address), or override-host (those that Envoy Gateway knows)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	o.Upstream = envoyconfigs.Upstream(*upstream)
	if *whose == "envoy" && o.Upstream != envoyconfigs.OriginalDst {
		return fmt.Errorf("--upstream %s: only Envoy Gateway knows endpoints (--for envoy-gateway)", *upstream)
	}
	config, _, err := configv1.Load(*file)
	if err != nil {
		return err
	}
	var text []byte
	switch *whose {
	case "envoy":
		text, err = envoyconfigs.Bootstrap(config)
	case "envoy-gateway":
		text, err = envoyconfigs.EnvoyGateway(config, o)
	default:
		err = fmt.Errorf("--for %q: it is envoy or envoy-gateway", *whose)
	}
	if err != nil {
		return err
	}
	if _, err := stdout.Write(text); err != nil {
		return fmt.Errorf("writing the configuration: %w", err)
	}
	return nil
}
