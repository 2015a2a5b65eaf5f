// A member of a consumer group that writes down what it gets, for world.py; as member.py.
package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"math/rand"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"example.org/mqtt-server/clients/go/gatewayv1"
)

// consume serves one stream, until it ends.
func consume(address, group, member string, out *bufio.Writer) error {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := gatewayv1.NewConsumerClient(connection).Consume(ctx)
	if err != nil {
		return err
	}
	open := &gatewayv1.Open{Group: group, MemberId: member}
	if err := stream.Send(&gatewayv1.ConsumeRequest{Action: &gatewayv1.ConsumeRequest_Open{Open: open}}); err != nil {
		return err
	}
	ids := map[uint64]string{}
	for {
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		var settled []uint64
		for _, item := range response.Items {
			switch item := item.Item.(type) {
			case *gatewayv1.ConsumeItem_Message:
				delivery := item.Message
				ids[delivery.DeliveryId] = delivery.MessageId
				fmt.Fprintf(out, "D %d %s %d %s .\n", time.Now().UnixNano(), delivery.MessageId, delivery.Attempt,
					delivery.GetMessage().Payload)
				switch chance := rand.Float64(); {
				case chance < 0.01:
					nack := &gatewayv1.Nack{Which: &gatewayv1.Ack{DeliveryIds: []uint64{delivery.DeliveryId}}}
					if err := stream.Send(&gatewayv1.ConsumeRequest{Action: &gatewayv1.ConsumeRequest_Nack{Nack: nack}}); err != nil {
						return err
					}
				case chance > 0.001:
					settled = append(settled, delivery.DeliveryId)
				}
			case *gatewayv1.ConsumeItem_AckResults:
				now := time.Now().UnixNano()
				for _, held := range item.AckResults.Ok {
					for id := held.First; id <= held.Last; id++ {
						if message, known := ids[id]; known {
							fmt.Fprintf(out, "A %d %s .\n", now, message)
							delete(ids, id)
						}
					}
				}
			}
		}
		if err := out.Flush(); err != nil {
			log.Fatal(err)
		}
		if len(settled) > 0 {
			ack := &gatewayv1.Ack{DeliveryIds: settled}
			if err := stream.Send(&gatewayv1.ConsumeRequest{Action: &gatewayv1.ConsumeRequest_Ack{Ack: ack}}); err != nil {
				return err
			}
		}
	}
}

func main() {
	args := os.Args[1:]
	byLibrary := len(args) == 5 && args[0] == "library"
	if byLibrary {
		args = args[1:]
	}
	if len(args) != 4 {
		log.Fatal("usage: gomember [library] ADDRESS GROUP MEMBER_ID FILE")
	}
	file, err := os.OpenFile(args[3], os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		log.Fatal(err)
	}
	out := bufio.NewWriter(file)
	// What was killed may have left half a line.
	fmt.Fprintln(out)
	if err := out.Flush(); err != nil {
		log.Fatal(err)
	}
	for {
		if byLibrary {
			log.Print(library(args[0], args[1], args[2], file))
		} else {
			log.Print(consume(args[0], args[1], args[2], out))
		}
		time.Sleep(200 * time.Millisecond)
	}
}
