package livecheck

import (
	"context"
	"log/slog"
	"strings"

	"tandem/kvstate/redisstore"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// CheckRedis asks the Redis of a configuration whether it can be reached, knows the password, and grants what replicas
// need. It does nothing without state.redis.
func CheckRedis(ctx context.Context, cfg *configv1.Config) error {
	r := cfg.GetState().GetRedis()
	if r == nil {
		return nil
	}
	o := config.RedisOptions(r, slog.New(slog.DiscardHandler))
	redisstore.LogTo(o.Log) // else its client writes of each try to stderr, beside the one sentence that follows
	var err error
	if o.TLS, err = config.RedisTLS(r.GetTls()); err == nil {
		err = redisstore.CheckRights(ctx, o)
	}
	if err == nil {
		return nil
	}
	var errs config.ValidationErrors
	for line := range strings.SplitSeq(err.Error(), "\n") {
		hint := line + " (docs/security.md, Redis, has the rights)"
		if !strings.Contains(line, " is refused by Redis") {
			hint = line + ": replicas would go on by themselves"
		}
		errs = append(errs, config.ValidationError{Path: "state.redis", Hint: hint})
	}
	return errs
}
