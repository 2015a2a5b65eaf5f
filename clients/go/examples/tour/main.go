// Publishes, asks a device, and reads what devices have sent.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	gateway "example.org/mqtt-server/clients/go"
	"example.org/mqtt-server/clients/go/gatewayv1"
)

func main() {
	client, err := gateway.Connect(cmp.Or(os.Getenv("GATEWAY_ADDRESS"), "localhost:10000"), gateway.Options{
		CA:    cmp.Or(os.Getenv("GATEWAY_CA"), "certs/ca.crt"),
		Token: os.Getenv("GATEWAY_TOKEN"),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx := context.Background()

	// Published once, whatever the network does, and waited for until every subscriber has acknowledged it.
	answer, err := client.PublishAndWait(ctx, &gatewayv1.PublishRequest{Topic: "lamp/switch", Payload: []byte("on")})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(answer.Outcome)

	reply, err := client.Commands.Send(ctx, &gatewayv1.SendRequest{
		Spec: &gatewayv1.CommandSpec{DeviceId: "lamp", Name: "blink", Payload: []byte("3")},
	})
	switch {
	case errors.Is(err, gateway.DeviceOffline):
		fmt.Println("the lamp is away")
	case err != nil:
		log.Fatal(err)
	default:
		fmt.Printf("the lamp answers %d %s\n", reply.DeviceStatus, reply.Payload)
	}

	for value, err := range client.Latest.List(ctx, &gatewayv1.ListLatestRequest{}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s %s %s\n", value.DeviceId, value.Topic, value.Payload)
	}
}
