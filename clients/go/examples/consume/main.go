// Consumes what meters send, until Ctrl-C or SIGTERM; what it has taken is finished and acknowledged first.
//
// Run several: they share the work. Kill one, or the gateway: nothing is lost.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	gateway "example.org/mqtt-server/clients/go"
	"example.org/mqtt-server/clients/go/gatewayv1"
)

// handle is called for one message of a meter after the other; for those of different meters beside each other.
func handle(_ context.Context, delivery *gateway.Delivery) error {
	fmt.Printf("%s %s %s\n", delivery.DeviceID(), delivery.Topic(), delivery.Payload())
	if len(delivery.Payload()) == 0 {
		later := time.Minute
		return gateway.GiveBack{Reason: "no reading", Delay: &later}
	}
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	client, err := gateway.Connect(cmp.Or(os.Getenv("GATEWAY_ADDRESS"), "localhost:10000"), gateway.Options{
		CA:    cmp.Or(os.Getenv("GATEWAY_CA"), "certs/ca.crt"),
		Token: os.Getenv("GATEWAY_TOKEN"),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	group := &gatewayv1.Group{Name: "billing", Filter: &gatewayv1.Filter{TopicFilters: []string{"meter/#"}}}
	// The same group again is no error.
	if _, err := client.Stubs.Groups.CreateGroup(ctx, &gatewayv1.CreateGroupRequest{Group: group}); err != nil {
		log.Fatal(err)
	}
	consumer := client.Consumer("billing", handle, gateway.ConsumeOptions{Concurrency: 8})
	fmt.Println("consuming")
	if err := consumer.Run(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(consumer.Confirmed(), "acknowledged")
}
