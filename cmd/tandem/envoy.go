package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	envoyconfigs "tandem/envoy-configs"
	"tandem/internal/config"
)

// newEnvoy is `tandem envoy`: it prints the Envoy configuration that belongs to a Tandem configuration, and nothing else, to
// stdout: a complete bootstrap, or the resources with which a gateway makes one.
func newEnvoy() *cobra.Command {
	var file, whose, upstream string
	var xds bool
	var o envoyconfigs.GatewayOptions
	c := &cobra.Command{
		Use: "envoy -f FILE", Short: "Print the Envoy bootstrap that belongs to a configuration", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return envoy(file, whose, upstream, xds, o, c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVarP(&file, "file", "f", "", "configuration `FILE` (YAML)")
	f.StringVar(&whose, "for", "envoy", "`WHOM` to configure: envoy (a bootstrap), or envoy-gateway (Kubernetes resources)")
	f.BoolVar(&xds, "xds", false, "a small bootstrap: Envoy gets all else, and changes of it, from tandem serve")
	f.StringVar(&o.Namespace, "namespace", "default", "`NAMESPACE` of the resources for Envoy Gateway")
	f.StringVar(&o.Name, "name", "tandem", "`NAME` of the resources for Envoy Gateway")
	f.StringVar(&o.Class, "class", "eg", "`CLASS`: GatewayClass of the resources for Envoy Gateway")
	f.BoolVar(&o.Standalone, "standalone", false, "Envoy Gateway runs without a cluster and starts Envoy itself")
	f.StringVar(&upstream, "upstream", string(envoyconfigs.OriginalDst), "how Envoy Gateway's Envoy gets to endpoints: original-dst (any address), or override-host (those that Envoy Gateway knows)")
	required(c, "file")
	return c
}

func envoy(file, whose, upstream string, xds bool, o envoyconfigs.GatewayOptions, stdout io.Writer) error {
	o.Upstream = envoyconfigs.Upstream(upstream)
	if whose == "envoy" && o.Upstream != envoyconfigs.OriginalDst {
		return fmt.Errorf("--upstream %s: only Envoy Gateway knows endpoints (--for envoy-gateway)", upstream)
	}
	if whose != "envoy" && xds {
		return fmt.Errorf("--xds: --for %s has no bootstrap", whose)
	}
	cfg, _, err := config.Load(file)
	if err != nil {
		return err
	}
	var text []byte
	switch {
	case whose == "envoy" && xds:
		text, err = envoyconfigs.DynamicBootstrap(cfg)
	case whose == "envoy":
		text, err = envoyconfigs.Bootstrap(cfg)
	case whose == "envoy-gateway":
		text, err = envoyconfigs.EnvoyGateway(cfg, o)
	default:
		err = fmt.Errorf("--for %q: it is envoy or envoy-gateway", whose)
	}
	if err != nil {
		return err
	}
	if _, err := stdout.Write(text); err != nil {
		return fmt.Errorf("writing the configuration: %w", err)
	}
	return nil
}
