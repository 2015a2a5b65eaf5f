module member

go 1.23

require (
	google.golang.org/grpc v1.71.0
	google.golang.org/protobuf v1.36.5
	mqtt-server v0.0.0
)

replace mqtt-server => ./generated
