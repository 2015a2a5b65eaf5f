// Reads the files of deploy/ as those read them that take them: Kubernetes objects by the types of its API, no unknown field
// let pass; Compose files by the library that `docker compose` is built on.
//
//	manifests kubernetes FILE...     `-` is standard input
//	manifests compose FILE PROFILE   prints the services that would start
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/compose-spec/compose-go/v2/cli"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	strict "sigs.k8s.io/yaml"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "manifests:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	switch {
	case len(arguments) >= 2 && arguments[0] == "kubernetes":
		for _, path := range arguments[1:] {
			if err := kubernetes(path); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
		return nil
	case len(arguments) == 3 && arguments[0] == "compose":
		return compose(arguments[1], arguments[2])
	}
	return errors.New("kubernetes FILE..., or compose FILE PROFILE")
}

func kubernetes(path string) error {
	var text []byte
	var err error
	if path == "-" {
		text, err = io.ReadAll(os.Stdin)
	} else {
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return err
	}
	documents := yaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(text)))
	defer documents.Close()
	buffer := make([]byte, 1<<20)
	found := 0
	for {
		n, err := documents.Read(buffer)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		var kind meta.TypeMeta
		if err := strict.Unmarshal(buffer[:n], &kind); err != nil {
			return err
		}
		var object any
		switch kind.APIVersion + " " + kind.Kind {
		case " ":
			// Comments alone.
			continue
		case "apps/v1 StatefulSet":
			object = &apps.StatefulSet{}
		case "v1 ConfigMap":
			object = &core.ConfigMap{}
		case "v1 Service":
			object = &core.Service{}
		case "monitoring.coreos.com/v1 ServiceMonitor":
			fmt.Println("not looked at, as it is no type of Kubernetes itself:", kind.Kind)
			continue
		default:
			return fmt.Errorf("%s %s: of no kind that is known here", kind.APIVersion, kind.Kind)
		}
		if err := strict.UnmarshalStrict(buffer[:n], object); err != nil {
			return fmt.Errorf("%s: %w", kind.Kind, err)
		}
		if err := fits(object); err != nil {
			return fmt.Errorf("%s: %w", kind.Kind, err)
		}
		fmt.Println(kind.Kind)
		found++
	}
	if found == 0 {
		return errors.New("no objects")
	}
	return nil
}

// What the types cannot say: names that others of the same file use.
func fits(object any) error {
	set, is := object.(*apps.StatefulSet)
	if !is {
		return nil
	}
	for key, value := range set.Spec.Selector.MatchLabels {
		if set.Spec.Template.Labels[key] != value {
			return fmt.Errorf("the selector asks for %s=%s, which the pods do not have", key, value)
		}
	}
	var volumes []string
	for _, volume := range set.Spec.Template.Spec.Volumes {
		volumes = append(volumes, volume.Name)
	}
	for _, claim := range set.Spec.VolumeClaimTemplates {
		volumes = append(volumes, claim.Name)
	}
	for _, container := range set.Spec.Template.Spec.Containers {
		for _, mount := range container.VolumeMounts {
			if !slices.Contains(volumes, mount.Name) {
				return fmt.Errorf("%s mounts %s, which is no volume", container.Name, mount.Name)
			}
		}
	}
	return nil
}

func compose(path, profile string) error {
	options, err := cli.NewProjectOptions([]string{path}, cli.WithProfiles([]string{profile}), cli.WithName("gateway"))
	if err != nil {
		return err
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		return err
	}
	for _, name := range project.ServiceNames() {
		fmt.Println(name)
	}
	return nil
}
