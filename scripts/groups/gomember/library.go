package main

import (
	"context"
	"fmt"
	"log"
	"math/rand"
	"os"
	"time"

	gateway "example.org/mqtt-server/clients/go"
)

// library consumes through the client library. It has lines for deliveries only: the library acknowledges. Of a hundred messages one is
// given back.
func library(address, group, member string, file *os.File) error {
	client, err := gateway.Connect(address, gateway.Options{Plaintext: true})
	if err != nil {
		return err
	}
	defer client.Close()
	handle := func(_ context.Context, delivery *gateway.Delivery) error {
		line := fmt.Sprintf("D %d %s %d %s .\n", time.Now().UnixNano(), delivery.MessageID, delivery.Attempt, delivery.Payload())
		if _, err := file.WriteString(line); err != nil {
			log.Fatal(err)
		}
		switch chance := rand.Float64(); {
		case chance < 0.01:
			return gateway.GiveBack{Reason: "one in a hundred"}
		case chance < 0.02:
			time.Sleep(2 * time.Millisecond)
		}
		return nil
	}
	return client.Consumer(group, handle, gateway.ConsumeOptions{MemberID: member}).Run(context.Background())
}
