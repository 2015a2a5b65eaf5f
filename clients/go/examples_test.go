package gateway_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// said is what a program has written so far.
type said struct {
	lock sync.Mutex
	text bytes.Buffer
}

func (s *said) Write(part []byte) (int, error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	return s.text.Write(part)
}

func (s *said) String() string {
	s.lock.Lock()
	defer s.lock.Unlock()
	return s.text.String()
}

func TestTheExamplesRunAsTheyStand(t *testing.T) {
	t.Parallel()
	folder, world := t.TempDir(), newWorld(t)
	if output, err := exec.Command("go", "build", "-o", folder, "./examples/...").CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, output)
	}
	program := func(name string, arguments ...string) (*exec.Cmd, *said) {
		command, output := exec.Command(filepath.Join(folder, name), arguments...), &said{}
		command.Env = append(os.Environ(), "GATEWAY_ADDRESS="+world.Address, "GATEWAY_CA="+world.CA, "GATEWAY_TOKEN="+world.Token)
		command.Stdout, command.Stderr = output, output
		return command, output
	}
	// Ends in order when it is told to.
	ends := func(command *exec.Cmd, output *said) {
		t.Helper()
		if err := command.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := command.Wait(); err != nil {
			t.Errorf("%v %s", err, output)
		}
	}
	world.device("lamp", "lamp/#", "cmd/lamp/#")
	world.device("meter")
	world.publish("meter", "meter/power", 1, 0)
	world.do("published", map[string]any{"id": "meter"}, nil)

	tour, output := program("tour")
	if err := tour.Run(); err != nil {
		t.Fatalf("%v %s", err, output)
	}
	if wanted := "OUTCOME_ACKED\nthe lamp answers 200 pong 3\nmeter meter/power 1\n"; output.String() != wanted {
		t.Error(output)
	}
	follow, output := program("follow", "meter/#")
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	until(t, "it follows", func() bool { return strings.Contains(output.String(), "following") })
	consume, consumed := program("consume")
	if err := consume.Start(); err != nil {
		t.Fatal(err)
	}
	until(t, "it consumes", func() bool { return strings.Contains(consumed.String(), "consuming") })
	world.publish("meter", "meter/power", 20, 0)
	until(t, "all came", func() bool { return strings.Count(output.String(), "meter/power ") == 20 })
	until(t, "all were consumed", func() bool { return strings.Count(consumed.String(), "meter meter/power ") == 20 })
	ends(follow, output)
	ends(consume, consumed)
	if !strings.HasSuffix(consumed.String(), "\n20 acknowledged\n") {
		t.Error(consumed)
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	if source, err := os.ReadFile("examples/tour/main.go"); err != nil || !bytes.Contains(readme, source) {
		t.Error("the README does not have examples/tour as it stands", err)
	}
}
