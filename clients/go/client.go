package gateway

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	mathrand "math/rand"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	"example.org/mqtt-server/clients/go/gatewayv1"
)

const (
	// heartbeat is how often streams ask for one; three without one and the stream is opened anew.
	heartbeat = 15 * time.Second
	// firstPause and longestPause bound what is waited before something is tried again; each is drawn from 0 to its bound.
	firstPause   = 100 * time.Millisecond
	longestPause = 5 * time.Second
)

// Options of a Client. The zero value is TLS, the system's authorities, and nothing to show.
type Options struct {
	// CA is a file with the authorities to believe, PEM; CAPEM the same as bytes.
	CA    string
	CAPEM []byte
	// Token is shown with each call. TokenSource is asked for it instead, each time.
	Token       string
	TokenSource func(context.Context) (string, error)
	// Certificate and Key of the client, PEM files.
	Certificate, Key string
	// Plaintext is without TLS.
	Plaintext bool
	// Timeout of calls whose context has no deadline; 0 is 30 seconds.
	Timeout time.Duration
	// DialOptions come last.
	DialOptions []grpc.DialOption
}

// Stubs are the generated clients of all services. Their errors are *Error, too.
type Stubs struct {
	Publisher  gatewayv1.PublisherClient
	Subscriber gatewayv1.SubscriberClient
	Groups     gatewayv1.GroupsClient
	Consumer   gatewayv1.ConsumerClient
	Commands   gatewayv1.CommandsClient
	Shadows    gatewayv1.ShadowsClient
	State      gatewayv1.StateClient
	Devices    gatewayv1.DevicesClient
	Events     gatewayv1.EventsClient
	Security   gatewayv1.SecurityClient
	Operations gatewayv1.OperationsClient
}

// Client of a gateway.
type Client struct {
	// Stubs has every method there is.
	Stubs Stubs
	// Commands are requests to devices, with their answers.
	Commands *Commands
	// Latest has the last message of each device on each topic.
	Latest *Latest
	// Shadows say what devices are to be, and what they say they are.
	Shadows *Shadows
	// Devices and their sessions.
	Devices *Devices

	connection *grpc.ClientConn
	timeout    time.Duration
	// Whether a token that expired may be followed by another.
	renews bool
}

// Connect makes a client of the gateway at address, "host:port". The connection is made with the first call, and again when it is lost.
func Connect(address string, options Options) (*Client, error) {
	transport, err := options.transport()
	if err != nil {
		return nil, err
	}
	dial := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 20 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true,
		}),
		// grpc's own pauses grow to two minutes, which is long for a gateway that was restarted.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: firstPause, Multiplier: 1.6, Jitter: 0.2, MaxDelay: longestPause},
			MinConnectTimeout: 5 * time.Second,
		}),
		// A page has 3 MiB at most, but for one item that is larger.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
		grpc.WithUnaryInterceptor(unaryErrors),
		grpc.WithStreamInterceptor(streamErrors),
	}
	if options.Token != "" || options.TokenSource != nil {
		dial = append(dial, grpc.WithPerRPCCredentials(bearer{options.Token, options.TokenSource}))
	}
	connection, err := grpc.NewClient(address, append(dial, options.DialOptions...)...)
	if err != nil {
		return nil, err
	}
	client := &Client{
		Stubs: Stubs{
			Publisher:  gatewayv1.NewPublisherClient(connection),
			Subscriber: gatewayv1.NewSubscriberClient(connection),
			Groups:     gatewayv1.NewGroupsClient(connection),
			Consumer:   gatewayv1.NewConsumerClient(connection),
			Commands:   gatewayv1.NewCommandsClient(connection),
			Shadows:    gatewayv1.NewShadowsClient(connection),
			State:      gatewayv1.NewStateClient(connection),
			Devices:    gatewayv1.NewDevicesClient(connection),
			Events:     gatewayv1.NewEventsClient(connection),
			Security:   gatewayv1.NewSecurityClient(connection),
			Operations: gatewayv1.NewOperationsClient(connection),
		},
		connection: connection,
		timeout:    options.Timeout,
		renews:     options.TokenSource != nil,
	}
	if client.timeout == 0 {
		client.timeout = 30 * time.Second
	}
	client.Commands, client.Latest = &Commands{client}, &Latest{client}
	client.Shadows, client.Devices = &Shadows{client}, &Devices{client}
	return client, nil
}

// Close ends the connection, and every call on it.
func (c *Client) Close() error { return c.connection.Close() }

func (o *Options) transport() (credentials.TransportCredentials, error) {
	if o.Plaintext {
		return insecure.NewCredentials(), nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	authorities := o.CAPEM
	if o.CA != "" {
		read, err := os.ReadFile(o.CA)
		if err != nil {
			return nil, err
		}
		authorities = read
	}
	if authorities != nil {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(authorities) {
			return nil, errors.New("gateway: no certificate in what names the authorities")
		}
	}
	if o.Certificate != "" {
		pair, err := tls.LoadX509KeyPair(o.Certificate, o.Key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config), nil
}

// bearer shows a token with each call.
type bearer struct {
	token  string
	source func(context.Context) (string, error)
}

func (b bearer) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	token := b.token
	if b.source != nil {
		var err error
		if token, err = b.source(ctx); err != nil {
			return nil, err
		}
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity: whether the connection is plaintext was said by Options.Plaintext.
func (b bearer) RequireTransportSecurity() bool { return false }

func unaryErrors(ctx context.Context, method string, request, reply any, connection *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	return errorOf(invoke(ctx, method, request, reply, connection, options...))
}

func streamErrors(ctx context.Context, desc *grpc.StreamDesc, connection *grpc.ClientConn, method string,
	open grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := open(ctx, desc, connection, method, options...)
	if err != nil {
		return nil, errorOf(err)
	}
	return typedStream{stream}, nil
}

type typedStream struct{ grpc.ClientStream }

func (s typedStream) RecvMsg(message any) error { return errorOf(s.ClientStream.RecvMsg(message)) }
func (s typedStream) SendMsg(message any) error { return errorOf(s.ClientStream.SendMsg(message)) }

// Publish publishes, and returns what became of it once it is routed, or as request.Wait says. A request without an idempotency key is
// sent once: if the connection is lost meanwhile, nobody knows whether it was published, and this fails.
func (c *Client) Publish(ctx context.Context, request *gatewayv1.PublishRequest) (*gatewayv1.PublishResponse, error) {
	return c.publish(ctx, request)
}

// PublishAndWait publishes once, and waits until every receiver that is online has acknowledged it, or as request.Wait says.
//
// It is tried again over lost connections and restarts of the gateway, always with the same idempotency key, so that it is published
// once. An Error has that key: the same call with it goes on waiting, for as long as the gateway remembers it. After OutcomeLost it must
// not be sent again.
func (c *Client) PublishAndWait(ctx context.Context, request *gatewayv1.PublishRequest) (*gatewayv1.PublishResponse, error) {
	request = proto.Clone(request).(*gatewayv1.PublishRequest)
	if request.Wait == gatewayv1.Wait_WAIT_UNSPECIFIED {
		request.Wait = gatewayv1.Wait_WAIT_ACKED
	}
	if request.IdempotencyKey == "" {
		request.IdempotencyKey = randomID()
	}
	return c.publish(ctx, request)
}

func (c *Client) publish(ctx context.Context, request *gatewayv1.PublishRequest) (*gatewayv1.PublishResponse, error) {
	answer, err := call(ctx, c, request.IdempotencyKey != "", c.Stubs.Publisher.Publish, request)
	var told *Error
	if errors.As(err, &told) {
		told.IdempotencyKey = request.IdempotencyKey
	}
	return answer, err
}

// call makes a call within its deadline, over as many attempts as it takes where doing it again does no harm.
func call[Request, Response any](ctx context.Context, c *Client, again bool,
	method func(context.Context, Request, ...grpc.CallOption) (Response, error), request Request) (Response, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}
	var pauses pauses
	for {
		answer, err := method(ctx, request)
		if err == nil || !again || !passes(err) {
			return answer, err
		}
		pause := pauses.next(err)
		if deadline, _ := ctx.Deadline(); time.Until(deadline) <= pause {
			return answer, err
		}
		if sleep(ctx, pause) != nil {
			return answer, err
		}
	}
}

// passes reports whether the same call may go better a little later.
func passes(err error) bool {
	var told *Error
	if !errors.As(err, &told) {
		return false
	}
	return told.Code == codes.Unavailable || told.Code == codes.ResourceExhausted && told.RetryAfter > 0
}

// resumes reports whether a stream that ended so is opened again: not where the gateway has said that it is of no use.
func (c *Client) resumes(err error) bool {
	var told *Error
	if !errors.As(err, &told) {
		return false
	}
	switch told.Code {
	case codes.Unauthenticated:
		return c.renews && (told.Reason == CredentialsExpired || told.Reason == CredentialsRevoked)
	case codes.Unavailable, codes.ResourceExhausted:
		return told.Reason != SlowConsumer
	case codes.Unknown, codes.Internal, codes.Canceled:
		// The connection broke, and grpc says so in one way or another.
		return told.Reason == Unknown
	default:
		return false
	}
}

// pauses grow, with full jitter: clients that lost the same gateway do not come back all at once.
type pauses struct{ bound time.Duration }

func (p *pauses) next(err error) time.Duration {
	if p.bound == 0 {
		p.bound = firstPause
	}
	pause := time.Duration(mathrand.Int63n(int64(p.bound) + 1))
	p.bound = min(p.bound*2, longestPause)
	var told *Error
	if errors.As(err, &told) {
		pause = max(pause, told.RetryAfter)
	}
	return pause
}

func (p *pauses) reset() { p.bound = 0 }

func sleep(ctx context.Context, span time.Duration) error {
	timer := time.NewTimer(span)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// randomID is a name that nobody else draws.
func randomID() string {
	var drawn [16]byte
	// Never fails: where the system has no random numbers, the program ends.
	_, _ = rand.Read(drawn[:])
	return hex.EncodeToString(drawn[:])
}
