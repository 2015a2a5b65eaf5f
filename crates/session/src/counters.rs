//! Counters of packets and messages.

gateway_core::counters! {
    "mqtt_messages_received_total": "PUBLISH packets received" {
        messages_in_0(qos = "0");
        messages_in_1(qos = "1");
        messages_in_2(qos = "2");
    }
    "mqtt_messages_sent_total": "PUBLISH packets sent" {
        messages_out_0(qos = "0");
        messages_out_1(qos = "1");
        messages_out_2(qos = "2");
    }
    "mqtt_packets_received_total": "MQTT packets received" {
        packets_in;
    }
    "mqtt_packets_sent_total": "MQTT packets sent" {
        packets_out;
    }
    "mqtt_payload_bytes_received_total": "Bytes of payload in PUBLISH packets received" {
        payload_bytes_in_0(qos = "0");
        payload_bytes_in_1(qos = "1");
        payload_bytes_in_2(qos = "2");
    }
    "mqtt_payload_bytes_sent_total": "Bytes of payload in PUBLISH packets sent" {
        payload_bytes_out_0(qos = "0");
        payload_bytes_out_1(qos = "1");
        payload_bytes_out_2(qos = "2");
    }
    "mqtt_deliveries_withheld_total": "Deliveries that the rules do not allow, of subscriptions that they filter" {
        deliveries_withheld;
    }
}
