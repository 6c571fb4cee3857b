package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"tandem/kvstate"
)

const (
	ordersTTL = 24 * time.Hour         // after the last replica has ended
	within    = 500 * time.Millisecond // for one exchange with Redis
	maxOrder  = 4 << 10                // bytes of one order
	maxOrders = 4096
)

func (o *Operator) ordersKey() string { return o.key("orders") }

// Sync applies the orders in Redis to the state, and adds to Redis the orders that it lacks.
func (o *Operator) Sync(ctx context.Context) error {
	o.syncing.Lock()
	defer o.syncing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	texts, err := o.redis.Client.HVals(ctx, o.ordersKey()).Result()
	if err != nil {
		return fmt.Errorf("reading orders: %w", err)
	}
	there := make(map[[2]string]int64, len(texts))
	var orders []kvstate.Order
	for _, signed := range texts[:min(len(texts), maxOrders)] {
		var order kvstate.Order
		text, ok := o.redis.Genuine(o.ordersKey(), signed)
		if !ok || len(text) > maxOrder || json.Unmarshal([]byte(text), &order) != nil || order.Pool == "" {
			continue
		}
		there[[2]string{order.Pool, order.Endpoint}] = order.Version
		orders = append(orders, order)
	}
	if n := o.state.ApplyOrders(orders); n > 0 {
		o.log.Info("orders of other replicas", "orders", n)
	}
	known := o.state.Orders()
	if len(known) == 0 {
		return nil
	}
	pipe := o.redis.Client.Pipeline()
	for _, order := range known {
		if order.Version > there[[2]string{order.Pool, order.Endpoint}] {
			text, err := json.Marshal(order)
			if err != nil {
				return err
			}
			pipe.HSet(ctx, o.ordersKey(), order.Pool+"\x00"+order.Endpoint, o.redis.Sign(o.ordersKey(), text))
		}
	}
	pipe.PExpire(ctx, o.ordersKey(), ordersTTL)
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("writing orders: %w", err)
	}
	return nil
}

// Publish publishes the orders of this replica. On an error they apply to this replica, and to the others as soon as
// Redis answers.
func (o *Operator) Publish(ctx context.Context) error {
	if err := o.Sync(ctx); err != nil {
		return err
	}
	_, err := o.add(ctx, entry{kind: kindOrders})
	return err
}
