package gateway_test

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	gateway "example.org/mqtt-server/clients/go"
)

const limit = time.Minute

// world is clients/testing/world.py: a gateway with devices and a bad network. GATEWAY is the binary; without it, that of `cargo build`.
type world struct {
	t       *testing.T
	lock    sync.Mutex
	in      io.WriteCloser
	out     *bufio.Scanner
	Address string `json:"address"`
	CA      string `json:"ca"`
	Token   string `json:"token"`
	Cert    string `json:"certificate"`
	Key     string `json:"key"`
}

func newWorld(t *testing.T) *world {
	t.Helper()
	server := os.Getenv("GATEWAY")
	if server == "" {
		server = "../../target/debug/mqtt-server"
	}
	server, err := filepath.Abs(server)
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command("python3", "../testing/world.py", server, t.TempDir())
	command.Stderr = os.Stderr
	in, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, in: in, out: bufio.NewScanner(out)}
	w.out.Buffer(nil, 1<<24)
	t.Cleanup(func() {
		in.Close()
		if err := command.Wait(); err != nil {
			t.Error("world.py:", err)
		}
	})
	w.do("start", nil, w)
	return w
}

// do lets world.py do something, and stores its answer.
func (w *world) do(what string, with map[string]any, answer any) {
	w.t.Helper()
	w.lock.Lock()
	defer w.lock.Unlock()
	request := map[string]any{"do": what}
	for key, value := range with {
		request[key] = value
	}
	line, err := json.Marshal(request)
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.in.Write(append(line, '\n')); err != nil {
		w.t.Fatal(err)
	}
	if !w.out.Scan() {
		w.t.Fatalf("world.py has ended at %s", line)
	}
	if answer != nil {
		if err := json.Unmarshal(w.out.Bytes(), answer); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *world) device(id string, filters ...string) {
	w.t.Helper()
	w.do("device", map[string]any{"id": id, "subscribe": filters}, nil)
}

func (w *world) publish(id, topic string, count int, pace float64) {
	w.t.Helper()
	w.do("publish", map[string]any{"id": id, "topic": topic, "count": count, "pace": pace}, nil)
}

func (w *world) received(id string, count int) (payloads []string) {
	w.t.Helper()
	var received [][2]string
	w.do("received", map[string]any{"id": id, "count": count}, &received)
	for _, one := range received {
		payloads = append(payloads, one[1])
	}
	return payloads
}

func (w *world) token(role, topics, expires string) (token string) {
	w.t.Helper()
	w.do("token", map[string]any{"role": role, "topics": topics, "expires": expires}, &token)
	return token
}

func (w *world) proxy() (address string) {
	w.t.Helper()
	w.do("proxy", nil, &address)
	return address
}

// connect makes a client, as an administrator unless options say who it is.
func (w *world) connect(address string, options gateway.Options) *gateway.Client {
	w.t.Helper()
	options.CA = w.CA
	client, err := gateway.Connect(address, options)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { client.Close() })
	return client
}

func (w *world) admin() *gateway.Client {
	w.t.Helper()
	return w.connect(w.Address, gateway.Options{Token: w.Token})
}

// until waits for a state, for a long time at most.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}
