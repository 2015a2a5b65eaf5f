// Follows what is published, with the gaps, until it is ended: follow [FILTER...]
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"

	gateway "example.org/mqtt-server/clients/go"
	"example.org/mqtt-server/clients/go/gatewayv1"
)

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
	stream, err := client.Subscribe(ctx, &gatewayv1.SubscribeRequest{TopicFilters: os.Args[1:]})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("following")
	for item, err := range stream.All() {
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			log.Fatal(err)
		case item.Gap != nil:
			fmt.Println("something is missing here:", item.Gap.Reason)
		default:
			fmt.Printf("%s %s\n", item.Message.Topic, item.Message.Payload)
		}
	}
}
