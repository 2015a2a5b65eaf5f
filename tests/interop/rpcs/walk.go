// Walks the table of RPCs and errors with grpc-go; walk.py does the same with grpcio, and says how.
//
//	walk TABLE WORLD
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
)

const deadline = 40 * time.Second

// Row is a row of the table; its head says what the fields mean.
type Row struct {
	Name       string
	On         string
	As         string
	Call       string
	Types      string
	Request    any
	Raw        *string
	Headers    map[string]string
	TimeoutMs  int `json:"timeout_ms"`
	Repeat     int
	Eventually bool
	Steps      []Step
	Ends       bool
	Answer     any
	Save       map[string]string
	Code       string
	Reason     string
	Metadata   map[string]any
	Retry      string
	Fields     []any
}

// Step is what is done with a stream that is open.
type Step struct {
	Send   any
	Close  bool
	Opened bool
	Read   any
	Save   map[string]string
	Row    *Row
	Signal string
}

// Table is what is walked.
type Table struct{ Rows []Row }

// World is what was started for it.
type World struct {
	Descriptors string
	Tokens      map[string]string
	Gateways    map[string]Address
}

// Address is where a gateway is.
type Address struct {
	Grpc, Pid int
	Ca        string
}

// Gateway is one gateway, and what rows have saved.
type Gateway struct {
	pid        int
	connection *grpc.ClientConn
	saved      map[string]string
	world      *World
	files      *protoregistry.Files
}

func (g *Gateway) types() *dynamicpb.Types { return dynamicpb.NewTypes(g.files) }

func (g *Gateway) message(name protoreflect.FullName) (*dynamicpb.Message, error) {
	descriptor, err := g.files.FindDescriptorByName(name)
	if err != nil {
		return nil, err
	}
	return dynamicpb.NewMessage(descriptor.(protoreflect.MessageDescriptor)), nil
}

func (g *Gateway) toJSON(message proto.Message) (any, error) {
	text, err := protojson.MarshalOptions{UseProtoNames: true, Resolver: g.types()}.Marshal(message)
	if err != nil {
		return nil, err
	}
	var value any
	return value, json.Unmarshal(text, &value)
}

// filled puts what is saved in place of {name}, and does what the head of the table says about $bytes, $times and $in.
func (g *Gateway) filled(value any) any {
	switch value := value.(type) {
	case string:
		for name, saved := range g.saved {
			value = strings.ReplaceAll(value, "{"+name+"}", saved)
		}
		return value
	case []any:
		all := []any{}
		for _, one := range value {
			all = append(all, g.filled(one))
		}
		return all
	case map[string]any:
		if bytes, is := value["$bytes"]; is {
			return base64.StdEncoding.EncodeToString(make([]byte, int(bytes.(float64))))
		}
		if seconds, is := value["$in"]; is {
			return time.Now().UTC().Add(time.Duration(seconds.(float64)) * time.Second).Format(time.RFC3339)
		}
		if times, is := value["$times"]; is {
			all := []any{}
			for range int(times.(float64)) {
				all = append(all, g.filled(value["of"]))
			}
			return all
		}
		all := map[string]any{}
		for key, one := range value {
			all[g.filled(key).(string)] = g.filled(one)
		}
		return all
	}
	return value
}

// fits says whether all that is expected is there; "*" is anything, and null nothing.
func fits(expected, actual any) bool {
	switch expected := expected.(type) {
	case string:
		if expected == "*" {
			return actual != nil
		}
	case map[string]any:
		actual, is := actual.(map[string]any)
		for key, value := range expected {
			if !is || !fits(value, actual[key]) {
				return false
			}
		}
		return is
	case []any:
		actual, _ := actual.([]any)
		for _, one := range expected {
			found := false
			for _, other := range actual {
				found = found || fits(one, other)
			}
			if !found {
				return false
			}
		}
		return len(expected) > 0 || len(actual) == 0
	}
	return reflect.DeepEqual(expected, actual)
}

func (g *Gateway) save(wanted map[string]string, answer any) error {
	for name, path := range wanted {
		value := answer
		for _, part := range strings.Split(path, ".") {
			switch at := value.(type) {
			case map[string]any:
				value = at[part]
			case []any:
				n, err := strconv.Atoi(part)
				if err != nil || n >= len(at) {
					return fmt.Errorf("no %s in %v", path, answer)
				}
				value = at[n]
			}
		}
		if value == nil {
			return fmt.Errorf("no %s in %v", path, answer)
		}
		g.saved[name] = fmt.Sprint(value)
	}
	return nil
}

// statusOf is the error as a row describes it.
func (g *Gateway) statusOf(err error) (map[string]any, error) {
	of := status.Convert(err).Proto()
	names := strings.Fields("OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS " +
		"PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE " +
		"DATA_LOSS UNAUTHENTICATED")
	found := map[string]any{"code": names[of.GetCode()]}
	for _, detail := range of.GetDetails() {
		message, err := g.message(detail.MessageName())
		if err != nil {
			return nil, err
		}
		if err := proto.Unmarshal(detail.Value, message); err != nil {
			return nil, err
		}
		decoded, err := g.toJSON(message)
		if err != nil {
			return nil, err
		}
		content := decoded.(map[string]any)
		switch detail.MessageName() {
		case "google.rpc.ErrorInfo":
			found["reason"], found["domain"] = content["reason"], content["domain"]
			found["metadata"] = map[string]any{}
			if content["metadata"] != nil {
				found["metadata"] = content["metadata"]
			}
		case "google.rpc.RetryInfo":
			found["retry"] = content["retry_delay"]
		case "google.rpc.BadRequest":
			fields := []any{}
			for _, violation := range content["field_violations"].([]any) {
				fields = append(fields, violation.(map[string]any)["field"])
			}
			found["fields"] = fields
		default:
			found[string(detail.MessageName())] = content
		}
	}
	return found, nil
}

// wrong is what the table says otherwise.
type wrong struct{ text string }

func (w wrong) Error() string { return w.text }

func (g *Gateway) walk(row *Row) error {
	for n := range max(row.Repeat, 1) {
		g.saved["n"] = strconv.Itoa(n)
		end := time.Now().Add(deadline)
		err := g.call(row)
		for err != nil && row.Eventually && time.Now().Before(end) {
			time.Sleep(20 * time.Millisecond)
			err = g.call(row)
		}
		if err != nil {
			name := row.Name
			if name == "" {
				name = row.Call
			}
			return wrong{name + ": " + err.Error()}
		}
	}
	return nil
}

// bytesCodec sends bytes as they are.
type bytesCodec struct{}

func (bytesCodec) Name() string                  { return "proto" }
func (bytesCodec) Marshal(v any) ([]byte, error) { return v.([]byte), nil }
func (bytesCodec) Unmarshal(data []byte, v any) error {
	return proto.Unmarshal(data, v.(proto.Message))
}

func (g *Gateway) call(row *Row) error {
	types := row.Types
	if types == "" {
		types = row.Call
	}
	found, err := g.files.FindDescriptorByName(protoreflect.FullName(strings.ReplaceAll(types, "/", ".")))
	if err != nil {
		return err
	}
	method := found.(protoreflect.MethodDescriptor)
	encoded := func(request any) (any, error) {
		if row.Raw != nil {
			return base64.StdEncoding.DecodeString(*row.Raw)
		}
		if request == nil {
			request = map[string]any{}
		}
		text, err := json.Marshal(g.filled(request))
		if err != nil {
			return nil, err
		}
		message := dynamicpb.NewMessage(method.Input())
		return message, protojson.UnmarshalOptions{Resolver: g.types()}.Unmarshal(text, message)
	}
	span := deadline
	if row.TimeoutMs != 0 {
		span = time.Duration(row.TimeoutMs) * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(context.Background(), span)
	defer cancel()
	for key, value := range row.Headers {
		ctx = metadata.AppendToOutgoingContext(ctx, key, g.filled(value).(string))
	}
	if row.As != "" {
		token, known := g.world.Tokens[row.As]
		if !known {
			token = row.As
		}
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+g.filled(token).(string))
	}
	options := []grpc.CallOption{}
	if row.Raw != nil {
		options = append(options, grpc.ForceCodec(bytesCodec{}))
	}
	answer := dynamicpb.NewMessage(method.Output())
	if method.IsStreamingServer() {
		description := grpc.StreamDesc{ServerStreams: true, ClientStreams: method.IsStreamingClient()}
		stream, streamErr := g.connection.NewStream(ctx, &description, "/"+row.Call, options...)
		if streamErr == nil && !method.IsStreamingClient() {
			request, err := encoded(row.Request)
			if err != nil {
				return err
			}
			if streamErr = stream.SendMsg(request); streamErr == nil {
				streamErr = stream.CloseSend()
			}
		}
		if streamErr == nil {
			streamErr = g.steps(row, stream, method, encoded)
		}
		err = streamErr
	} else {
		request, problem := encoded(row.Request)
		if problem != nil {
			return problem
		}
		if err = g.connection.Invoke(ctx, "/"+row.Call, request, answer, options...); err == nil {
			decoded, err := g.toJSON(answer)
			if err != nil {
				return err
			}
			if row.Answer != nil && !fits(g.filled(row.Answer), decoded) {
				return fmt.Errorf("answered %v", decoded)
			}
			if err := g.save(row.Save, decoded); err != nil {
				return err
			}
		}
	}
	var differs wrong
	if errors.As(err, &differs) {
		return err
	}
	ended, err := g.statusOf(err)
	if err != nil {
		return err
	}
	expected := map[string]any{"code": "OK"}
	if row.Code != "" {
		expected["code"] = row.Code
	}
	if row.Reason != "" {
		expected["reason"], expected["domain"] = row.Reason, "mqtt-server"
		expected["metadata"] = map[string]any{}
		if row.Metadata != nil {
			expected["metadata"] = g.filled(row.Metadata)
		}
	}
	if row.Retry != "" {
		expected["retry"] = row.Retry
	}
	if row.Fields != nil {
		expected["fields"] = row.Fields
	}
	counts := func(of map[string]any) [2]int {
		metadata, _ := of["metadata"].(map[string]any)
		return [2]int{len(of), len(metadata)}
	}
	if !fits(expected, ended) || counts(expected) != counts(ended) {
		return fmt.Errorf("ended with %v, not %v", ended, expected)
	}
	return nil
}

// steps goes through the steps of a stream; how it ended, or nil if it was to go on.
func (g *Gateway) steps(row *Row, stream grpc.ClientStream, method protoreflect.MethodDescriptor,
	encoded func(any) (any, error)) error {
	for _, step := range row.Steps {
		switch {
		case step.Send != nil:
			request, err := encoded(step.Send)
			if err != nil {
				return wrong{err.Error()}
			}
			if err := stream.SendMsg(request); err != nil && err != io.EOF {
				return err
			}
		case step.Close:
			if err := stream.CloseSend(); err != nil {
				return err
			}
		case step.Opened:
			if _, err := stream.Header(); err != nil {
				return err
			}
		case step.Read != nil:
			expected, answer := g.filled(step.Read), any(nil)
			for answer == nil || !fits(expected, answer) {
				message := dynamicpb.NewMessage(method.Output())
				err := stream.RecvMsg(message)
				if err == nil {
					answer, err = g.toJSON(message)
				}
				if err != nil {
					return wrong{fmt.Sprintf("ended before %v with %v and %v", expected, answer, err)}
				}
			}
			if err := g.save(step.Save, answer); err != nil {
				return wrong{err.Error()}
			}
		case step.Row != nil:
			if err := g.walk(step.Row); err != nil {
				return wrong{err.Error()}
			}
		case step.Signal == "SIGTERM":
			if err := syscall.Kill(g.pid, syscall.SIGTERM); err != nil {
				return wrong{err.Error()}
			}
		default:
			return wrong{fmt.Sprintf("no such step: %v", step)}
		}
	}
	if row.Ends || row.Code != "" && row.Code != "OK" {
		for {
			if err := stream.RecvMsg(dynamicpb.NewMessage(method.Output())); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
		}
	}
	return nil
}

func read(path string, into any) {
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		log.Fatal(path, ": ", err)
	}
}

func main() {
	var table Table
	var world World
	read(os.Args[1], &table)
	read(os.Args[2], &world)
	encoded, err := os.ReadFile(world.Descriptors)
	if err != nil {
		log.Fatal(err)
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(encoded, &set); err != nil {
		log.Fatal(err)
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		log.Fatal(err)
	}
	var lock sync.Mutex
	var all sync.WaitGroup
	walked, failed := 0, false
	for name, at := range world.Gateways {
		ca, err := os.ReadFile(at.Ca)
		if err != nil {
			log.Fatal(err)
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(ca)
		secure := credentials.NewTLS(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12})
		connection, err := grpc.NewClient(fmt.Sprintf("localhost:%d", at.Grpc), grpc.WithTransportCredentials(secure))
		if err != nil {
			log.Fatal(err)
		}
		gateway := Gateway{at.Pid, connection, map[string]string{}, &world, files}
		all.Add(1)
		go func() {
			defer all.Done()
			defer connection.Close()
			for i := range table.Rows {
				if table.Rows[i].On != name {
					continue
				}
				err := gateway.walk(&table.Rows[i])
				lock.Lock()
				if err == nil {
					walked++
				} else {
					failed = true
					fmt.Printf("%s: %v\n", name, err)
				}
				lock.Unlock()
				if err != nil {
					return
				}
			}
		}()
	}
	all.Wait()
	fmt.Printf("grpc-go %s: %d of %d rows are as the table says\n", grpc.Version, walked, len(table.Rows))
	if failed || walked != len(table.Rows) {
		os.Exit(1)
	}
}
